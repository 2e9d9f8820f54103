"""Shared consumption where members wake late, leave, or do without a server; and what operators and checks see of it.

Messages that are *lost to a member* are read here by hand, under a name of which nobody hears again.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from mqlayer import Context, MemberOptions, Producer
from mqlayer.doctor.verify import verify
from mqlayer.domain.message import Identity
from mqlayer.domain.routing import lp_of
from mqlayer.errors import Reject, StaleOwner
from mqlayer.groups.admin import evict_member
from mqlayer.maintenance import clean_inbox
from mqlayer.postgres.queries import query
from mqlayer.redelivery import DeadFilter, discard_parked, release_all, start_redrive, work_on
from mqlayer.redis.shared_scripts import SharedGroupPartition, shared_read_command, shared_reclaim_command
from mqlayer.topics import create_topic, register_node
from tests.fixtures.consumers import Recorder, Stage, StartStage, migrated
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.servers import StartPostgres, StartRedis
from tests.fixtures.shared_members import due, pending, share, shared_member
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

DAY_S = 86_400.0


def rows(stage: Stage, sql: str) -> list[tuple[Any, ...]]:
    """Return what the database says."""
    with stage.database.connection() as connection:
        return connection.execute(sql.encode()).fetchall()


def dead(stage: Stage) -> list[tuple[bytes, str]]:
    """Return body and cause of what is dead."""
    found = rows(stage, "SELECT body, cause FROM mqlayer.dead_message WHERE redriven_at IS NULL ORDER BY dead_id")
    return [(bytes(body), cause) for body, cause in found]


def lost_to(stage: Stage, partition: int, epoch: int, count: int = 100) -> int:
    """Read what is new for a member that is never heard of again, and have it taken from that; return how many."""
    place = SharedGroupPartition(stage.prefix, partition, stage.group_id(), epoch)
    with stage.connection() as connection:
        read = shared_read_command([place], "gone", group_id=place.group_id, count=count, block_ms=0)
        assert connection.call([read])[0]
        return int(connection.call([shared_reclaim_command(connection, place, 0)])[0][1])


# -- members -----------------------------------------------------------------------------------------------------------


def test_a_filter_holds_for_what_comes_again_from_a_member_that_is_gone(stage: Stage) -> None:
    """Case 62: what it leaves out is handled by nobody, whoever had it first."""
    [partition, _] = stage.partitions
    recorder = Recorder()
    app = share(stage, recorder, tag_filter="any:eu")
    key = stage.key_in(partition)
    with Producer(stage.settings(), name="tags") as producer:
        producer.send(stage.topic, key=key, body=b"0", tags=("eu",))
        stage.wait_settled()
        epoch = shared_member(app).owned()[partition][0]
        app.stop()
        for number in range(1, 21):
            producer.send(stage.topic, key=key, body=b"%d" % number, tags=("eu",) if number % 2 else ("us",))
    assert lost_to(stage, partition, epoch) == 20
    app = share(stage, recorder, tag_filter="any:eu")
    stage.wait_settled()
    assert sorted(map(int, recorder.bodies())) == [0, *range(1, 21, 2)]
    assert shared_member(app).stats.unmatched == 10


def test_what_nobody_began_goes_to_others_at_once_while_a_member_that_leaves_is_still_at_work(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 71: at a stop, and when an operator evicts it; what it is at stays its own."""
    # Only a living member can be evicted.
    monkeypatch.setattr("tests.fixtures.consumers.LEASE_S", 10.0)
    evicted, stopped, others = Recorder(), Recorder(), Recorder()
    go_on = threading.Event()
    for recorder in (evicted, stopped):
        recorder.act = lambda _body, _ctx: (go_on.wait(20), None)[1]
    stage.send_numbers(keys=10, each=4)
    first = share(stage, evicted, concurrency=1, visibility_timeout_s=60.0)
    wait_until(lambda: len(evicted.begun) == 1 and shared_member(first).prefetch.count > 1, what="more in hand")
    second = share(stage, stopped, concurrency=1, visibility_timeout_s=60.0)
    evict_member(runtime_of(stage.database, actor="test"), stage.topic, "g", shared_member(first).member_id)
    wait_until(lambda: len(stopped.begun) == 1 and not shared_member(first).running, what="the other is at work")
    stopper = threading.Thread(target=second.stop)
    stopper.start()
    share(stage, others, visibility_timeout_s=60.0)
    wait_until(lambda: len(others.ended) == 38, what="all but what is under way is handled by others")
    assert {handled.attempt for handled in others.begun} == {1}
    go_on.set()
    stopper.join(20)
    stage.wait_settled()
    assert len(evicted.begun) == len(stopped.begun) == 1


def test_a_message_whose_fence_knew_a_newer_epoch_comes_again_and_is_not_counted(stage: Stage) -> None:
    """Members may know different listings for a moment."""
    stale = [True]

    def act(_body: bytes, ctx: Context) -> None:
        if stale and stale.pop():
            raise StaleOwner("g", ctx.topic, ctx.identity.lp, ctx.epoch, ctx.epoch + 1)

    recorder = Recorder(act)
    app = share(stage, recorder, attempt_limit=1, visibility_timeout_s=30.0)
    stage.send([("k", b"1")])
    stage.wait_settled()
    assert recorder.attempts(b"1") == [1, 1]
    assert (shared_member(app).stats.fenced, dead(stage)) == (1, [])


# -- servers -----------------------------------------------------------------------------------------------------------


def test_a_node_that_is_away_does_not_keep_others_from_being_read(
    start_stage: StartStage, redis_url: str, start_redis: StartRedis
) -> None:
    """What is in hand of it can't be settled, and takes no room meanwhile; it is handled once."""
    stage, far = start_stage(redis_url), start_redis()
    register_node(runtime_of(stage.database), name="node-2", url=far.url)
    route = create_topic(runtime_of(stage.database, stage.prefix, application=stage.database), "wide", partitions=2)
    near = next(one for one in route.ranges if one.node == stage.route.ranges[0].node)
    keys = [f"key-{number}" for number in range(200)]
    here = [key for key in keys if near.lp_from <= lp_of(key.encode()) < near.lp_to]
    there = [key for key in keys if key not in here]
    go_on = threading.Event()
    recorder = Recorder(lambda body, _ctx: (go_on.wait(20), None)[1] if body == b"far" else None)
    app = stage.app()
    app.consumer(
        "wide", group="g", mode="shared", start="earliest", visibility_timeout_s=1.0,
        options=MemberOptions(concurrency=2, prefetch_count=10),
    )(recorder)  # fmt: skip
    app.start()
    with Producer(stage.settings(), name="wide") as producer:
        for key in there[:20]:
            producer.send("wide", key=key, body=b"far")
        wait_until(lambda: shared_member(app).prefetch.capacity() <= 0, what="no room is left")
        far.kill()
        go_on.set()
        for key in here[:30]:
            producer.send("wide", key=key, body=b"near")
        near_keys = set(here[:30])
        wait_until(lambda: {h.key for h in list(recorder.ended)} >= near_keys, what="the other node is read")
        far.start()
        wait_until(lambda: recorder.count() == 50, timeout_s=20, what="the node's are handled too")


@pytest.mark.full
def test_while_postgres_is_away_what_dies_stays_in_hand_and_is_written_once_it_is_back(
    start_stage: StartStage, redis_url: str, start_postgres: StartPostgres, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 67: other messages go on, also for longer than the visibility timeout."""
    server = start_postgres()
    stage = start_stage(redis_url, dsn=migrated(server))

    def act(body: bytes, _ctx: Context) -> None:
        if body.startswith(b"bad"):
            raise Reject("no")

    recorder = Recorder(act)
    share(stage, recorder, visibility_timeout_s=2.0)
    stage.send([("k", b"1")])
    stage.wait_settled()
    server.kill()
    stage.send([("k", b"bad"), ("k", b"2"), ("l", b"bad-2"), ("l", b"3")])
    wait_until(lambda: "failure_writer_blocked" in caplog.text, what="it noticed")
    stage.send([("k", b"4")])
    wait_until(lambda: recorder.count() == 4, what="others are handled")
    waited = threading.Event()
    threading.Timer(2.5, waited.set).start()
    wait_until(waited.is_set, what="longer than the visibility timeout")
    server.start()
    stage.wait_settled()
    assert sorted(dead(stage)) == [(b"bad", "rejected"), (b"bad-2", "rejected")]
    assert recorder.attempts(b"bad") == [1]


def test_a_record_that_somebody_removes_while_it_waits_is_settled(every_stage: Stage) -> None:
    """By hand: it is nobody's, and must not hold up what comes behind it."""
    [partition, _] = every_stage.partitions

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"1":
            raise ValueError("no")

    app = share(every_stage, Recorder(act), backoff_s=(0.6,))
    every_stage.send([(every_stage.key_in(partition), b"%d" % number) for number in range(1, 4)])
    wait_until(lambda: pending(every_stage, partition) == {b"-": 1}, what="it waits, and others are settled")
    every_stage.redis.xdel(every_stage.keys(partition).log, "1-0")
    every_stage.wait_settled()
    assert due(every_stage, partition) == 0
    assert every_stage.redis.hlen(every_stage.group_keys(partition).attempts) == 0
    assert shared_member(app).stats.handled == 2


# -- operators and checks ----------------------------------------------------------------------------------------------


def redriven(stage: Stage, body: bytes = b"bad") -> tuple[Recorder, threading.Event]:
    """Have a message die and given back, and a member at it; return its handler and what lets that go on."""
    go_on = threading.Event()

    def act(body: bytes, ctx: Context) -> None:
        if len([one for one in recorder.begun if one.key == ctx.key]) == 1:
            raise Reject("no")
        go_on.wait(20)

    recorder = Recorder(act)
    share(stage, recorder, visibility_timeout_s=5.0)
    stage.send([("k", body)])
    stage.wait_settled()
    redrive = start_redrive(runtime_of(stage.database, actor="test"), stage.topic, "g", DeadFilter(), worker="w")
    assert work_on(stage.database, redrive, worker="w").done == 1
    wait_until(lambda: len(recorder.begun) == 2, what="it is at work on what was given back")
    return recorder, go_on


def test_what_is_claimed_and_discarded_stays_dead_whatever_its_handler_says(stage: Stage) -> None:
    """Case 67."""
    recorder, go_on = redriven(stage)
    identity = Identity(1, int(lp_of(b"k")), 1)
    assert (
        discard_parked(runtime_of(stage.database, actor="test"), stage.topic, "g", message=identity, reason="test") == 1
    )
    go_on.set()
    wait_until(lambda: len(recorder.ended) == 1, what="its handler ended")
    stage.send([("l", b"bad")])
    wait_until(lambda: len(dead(stage)) == 2, what="the failure writer goes on")
    assert dead(stage) == [(b"bad", "discarded"), (b"bad", "rejected")]
    assert rows(stage, "SELECT 1 FROM mqlayer.parked_key") == []


def test_what_is_claimed_and_released_is_handled_and_leaves_nothing(stage: Stage) -> None:
    recorder, go_on = redriven(stage)
    release_all(runtime_of(stage.database, actor="test"), stage.topic, "g")
    go_on.set()
    wait_until(lambda: rows(stage, "SELECT 1 FROM mqlayer.parked_key") == [], what="nothing is left of it")
    assert len(recorder.ended) in (1, 2), "an operator may have it given to another beside the first"
    assert dead(stage) == []


def test_checks_tell_the_truth_of_a_shared_group(stage: Stage) -> None:
    """Case 77: the inbox keeps what may come again; `verify` and the doctor's question see the group as it is."""

    def act(body: bytes, ctx: Context) -> None:
        if body == b"2":
            raise ValueError("no")
        with kept_session(stage.dsn) as connection:
            ctx.inbox(connection)

    def living() -> list[tuple[Any, ...]]:
        return [row[:3] for row in rows(stage, query("check_groups"))]

    stage.clock = lambda: time.time() - 30 * DAY_S
    app = share(stage, Recorder(act), backoff_s=(60.0,), visibility_timeout_s=60.0)
    stage.send_numbers(keys=1, each=4)
    wait_until(lambda: shared_member(app).stats.settled == 3, what="all but one are settled")
    assert living() == [("orders", "g", 1)]
    found = verify(runtime_of(stage.database, stage.prefix, application=stage.database), stage.topic, deep=True)
    assert [one for one in found if one.verdict != "ok" and one.check == "group"] == []

    def cleaned(days: int) -> int:
        with stage.database.connection() as connection:
            connection.execute("UPDATE mqlayer_app.inbox SET kept_at = now() - %s * interval '1 day'", [days])
        return clean_inbox(runtime_of(stage.database, stage.prefix, application=stage.database), horizon_s=7 * DAY_S)

    assert cleaned(29) == 0, "they may come again with what waits"
    assert cleaned(32) == 3
    app.stop()
    assert living() == [("orders", "g", 0)]
