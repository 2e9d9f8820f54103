"""Shared consumption where things change under it: nodes that fall back, groups that vanish, route changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from pathlib import Path

import pytest

from mqlayer import Context
from mqlayer.errors import Reject
from mqlayer.groups import apply_seek, planned_seek
from mqlayer.groups.admin import pause_group, resume_group
from mqlayer.inspect import group_statuses
from mqlayer.maintenance import trim_pass
from mqlayer.redelivery import skip_head
from mqlayer.redis.partition_scripts import Fenced
from mqlayer.redis.shared_scripts import (
    SharedGroupPartition,
    native_group,
    shared_acquire_command,
    shared_acquire_reply,
    shared_attempt_command,
    shared_count_reply,
    shared_due_command,
    shared_due_reply,
    shared_extend_command,
    shared_extend_reply,
    shared_nack_command,
    shared_reclaim_command,
    shared_settle_command,
    shared_settle_reply,
)
from mqlayer.routes import apply_change, plan_split, retire_partitions
from mqlayer.runtime.route_cache import RouteCache, load_route
from mqlayer.stack import RedisServer
from tests.fixtures.archived_outcomes import ArchivedOutcomes
from tests.fixtures.consumers import Recorder, Stage, StartStage
from tests.fixtures.servers import StartRedis
from tests.fixtures.shared_members import due, pending, share, shared_member
from tests.fixtures.wait import wait_until
from tests.proof.fall_back import FallBack, lose_all
from tests.proof.runtimes import runtime_of

as_consumer = pytest.mark.usefixtures("as_consumer")
"""Where no node restarts: members that may only consume leave arming to a relay or a worker."""


@pytest.fixture
def own_redis(start_redis: StartRedis) -> RedisServer:
    return start_redis()


def test_after_a_fall_back_no_old_ack_settles_a_new_message(
    start_stage: StartStage, own_redis: RedisServer, tmp_path: Path
) -> None:
    """Every call of before is refused, and what runs on then changes nothing."""
    stage = start_stage(own_redis.url, partitions=1)
    [partition] = stage.partitions
    old_go_on, new_go_on = threading.Event(), threading.Event()

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"old-8":
            old_go_on.wait(60)
        if body.startswith(b"new"):
            new_go_on.wait(60)

    recorder = Recorder(act)
    stage.send((f"k{number}", b"old-%d" % number) for number in range(1, 6))
    app = share(stage, recorder, concurrency=16, visibility_timeout_s=30.0)
    stage.wait_settled()
    back = FallBack(own_redis, tmp_path / "then")
    stage.send((f"k{number}", b"old-%d" % number) for number in range(6, 11))
    member = shared_member(app)
    wait_until(lambda: member.stats.settled == 9, what="all settled but one that runs")
    old = SharedGroupPartition(stage.prefix, partition, stage.group_id(), member.owned()[partition][0])
    back.happen()
    stage.forget_numbers()
    stage.send(((f"n{number}", b"new-%d" % number) for number in range(6, 11)), source=2)
    wait_until(lambda: len([h for h in recorder.begun if h.body[:3] == b"new"]) == 5, timeout_s=30, what="new ones")
    new_epoch = member.owned()[partition][0]
    assert new_epoch > old.epoch
    with stage.connection() as connection:
        who = member.member_id
        calls = [
            (shared_settle_command(connection, old, who, [(6, 10)]), shared_settle_reply),
            (shared_due_command(connection, old, who, 5), shared_due_reply),
            (shared_nack_command(connection, old, who, [(8, 0, 3)]), shared_count_reply),
            (shared_extend_command(connection, old, who, [8]), shared_extend_reply),
            (shared_reclaim_command(connection, old, 1), shared_count_reply),
            (shared_acquire_command(connection, old), shared_acquire_reply),
        ]
        for command, judge in calls:
            assert judge(connection.call([command])[0], "") == Fenced(new_epoch)
        assert connection.call([shared_attempt_command(connection, old, who, 8)])[0][0] == b"fenced"
    handled = member.stats.handled
    old_go_on.set()
    wait_until(lambda: member.stats.handled == handled + 1, what="the old handler ended")
    assert stage.position(partition) == (6, 11)
    new_go_on.set()
    stage.wait_settled()
    assert sorted(recorder.bodies())[:5] == [b"new-10", b"new-6", b"new-7", b"new-8", b"new-9"]


def test_a_node_that_lost_everything_is_repaired_and_the_group_begins_there_anew(
    start_stage: StartStage, own_redis: RedisServer
) -> None:
    stage = start_stage(own_redis.url, partitions=1)
    recorder = Recorder()
    stage.send([("k", b"1")])
    app = share(stage, recorder)
    stage.wait_settled()
    lose_all(own_redis)
    stage.wait_made_again()
    wait_until(lambda: shared_member(app).health().ready, timeout_s=20, what="it reads again")
    stage.forget_numbers()
    stage.send([("k", b"2")], source=2)
    wait_until(lambda: recorder.bodies() == [b"1", b"2"], what="handled")


def test_a_native_group_that_somebody_destroys_is_made_again_at_its_place(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    stage.send_numbers(keys=4, each=5)
    share(stage, recorder, visibility_timeout_s=30.0)
    stage.wait_settled()
    with caplog.at_level(logging.ERROR):
        for partition in stage.partitions:
            stage.redis.xgroup_destroy(stage.keys(partition).log, native_group(stage.group_id()))
        stage.send_numbers(keys=4, each=5, first=6)
        stage.wait_settled()
    assert "shared_group_missing" in caplog.text
    assert sorted(recorder.bodies("key-0"), key=int) == [b"%d" % number for number in range(1, 11)]
    assert len(recorder.ended) == 40


@as_consumer
def test_a_split_goes_on_while_a_message_of_the_parent_waits_and_ends_when_it_is_settled(stage: Stage) -> None:
    """Case 24 without order: successors are read at once, the parent is retired when all of it is settled."""
    stop_failing = threading.Event()

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"late" and not stop_failing.is_set():
            raise ValueError("not yet")

    recorder = Recorder(act)
    parent = stage.partitions[0]
    key = stage.key_in(parent)
    app = share(stage, recorder, backoff_s=(0.3,), attempt_limit=100)
    stage.send([(key, b"late"), (key, b"1")])
    wait_until(lambda: recorder.bodies() == [b"1"], what="the other one is handled")
    middle = (stage.route.ranges[0].lp_from + stage.route.ranges[0].lp_to) // 2
    plan = plan_split(stage.route, stage.route.ranges[0].partition, [middle])
    apply_change(runtime_of(stage.database, stage.prefix, application=stage.database, actor="test"), plan)
    stage.route = load_route(stage.database, stage.topic)
    stage.partitions = [line.partition for line in stage.route.ranges]
    wait_until(lambda: len(shared_member(app).owned()) == 4, what="parent and successors are read")
    stage.send([(key, b"2")])
    wait_until(lambda: recorder.bodies() == [b"1", b"2"], what="handled while the parent waits")

    def facts() -> tuple[str, int | None]:
        [status] = group_statuses(stage.runtime, stage.topic)
        return status.facts.mode, status.lag

    wait_until(lambda: facts() == ("shared", 1), what="all but the one that waits are settled")
    assert retire_partitions(stage.runtime) == []
    stop_failing.set()
    wait_until(lambda: len(shared_member(app).owned()) == 3, what="the parent is drained")
    stage.wait_retired(parent)
    stage.send([(key, b"3")])
    stage.wait_settled()
    assert sorted(recorder.bodies()) == [b"1", b"2", b"3", b"late"]


@as_consumer
def test_trimming_stays_below_the_lowest_message_that_is_not_settled(start_stage: StartStage, redis_url: str) -> None:
    stage = start_stage(redis_url, partitions=1)
    [partition] = stage.partitions

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"1000":
            raise ValueError("no")

    share(stage, Recorder(act), backoff_s=(60.0,))
    stage.send(("k", b"%d" % number) for number in range(1, 2001))

    def all_but_one() -> bool:
        [status] = group_statuses(stage.runtime, stage.topic)
        return status.lag == 1 and pending(stage, partition) == {b"-": 1}

    # A lag of one alone also holds while other messages are not read yet.
    wait_until(all_but_one, what="all but one are settled")
    trim_pass(stage.runtime)
    first = int(stage.redis.hget(stage.keys(partition).meta, "first") or 1)
    assert 800 < first <= 1000
    [status] = group_statuses(stage.runtime, stage.topic)
    assert status.lag == 1


@as_consumer
def test_a_seek_gives_everything_again(stage: Stage) -> None:
    recorder = Recorder()
    stage.send_numbers(keys=3, each=3)
    share(stage, recorder, visibility_timeout_s=30.0)
    stage.wait_settled()
    with contextlib.closing(RouteCache(stage.database)) as routes:
        plan = planned_seek(stage.runtime, routes, topic=stage.topic, name="g", to="earliest")
    apply_seek(runtime_of(stage.database, stage.prefix, actor="test"), plan)
    wait_until(lambda: len(recorder.ended) == 18, what="all of it again")
    stage.wait_settled()


def test_what_died_before_a_fall_back_is_passed_over_where_it_comes_again(
    start_stage: StartStage, own_redis: RedisServer, tmp_path: Path
) -> None:
    """Case 67."""
    stage = start_stage(own_redis.url, partitions=1)

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"bad":
            raise Reject("no")

    recorder = Recorder(act)
    stage.send([("k", b"first"), ("k", b"bad")])
    back = FallBack(own_redis, tmp_path / "then")
    app = share(stage, recorder, visibility_timeout_s=30.0)
    stage.wait_settled()
    app.stop()
    back.happen()
    share(stage, recorder, visibility_timeout_s=30.0)
    stage.wait_settled()
    assert recorder.attempts(b"bad") == [1]
    assert due(stage, stage.partitions[0]) == 0


@as_consumer
def test_a_filter_and_an_archive_see_what_became_of_each_message(stage: Stage) -> None:
    """Cases 62 and 79: handled ones are told once, with their failed attempts."""
    told = ArchivedOutcomes(stage.database, stage.topic, stage.prefix)

    def act(body: bytes, ctx: Context) -> None:
        if body == b"2" and ctx.attempt < 3:
            raise ValueError("no")
        if body == b"3":
            raise Reject("no")

    share(stage, Recorder(act), visibility_timeout_s=30.0)
    stage.send_numbers(keys=1, each=4)
    stage.wait_settled()
    told.fetch()
    words = {words[0] for words in told.words().values()}
    assert words == {("handled", 1), ("handled", 3), ("rejected", 1)}
    assert {len(words) for words in told.words().values()} == {1}


@as_consumer
def test_an_operator_may_pass_over_a_message_that_waits(stage: Stage) -> None:
    """Case 69."""

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"2":
            raise ValueError("no")

    recorder = Recorder(act)
    app = share(stage, recorder, backoff_s=(60.0,), visibility_timeout_s=5.0)
    stage.send_numbers(keys=1, each=3)
    wait_until(lambda: shared_member(app).stats.settled == 2, what="the others are settled")
    skipped = skip_head(
        runtime_of(stage.database, stage.prefix, actor="test"), stage.topic, "g", "key-0", reason="test"
    )
    assert not skipped.parked
    wait_until(lambda: len(shared_member(app).owned()) == 2 and shared_member(app).health().ready, what="it reads on")
    stage.send_numbers(keys=1, each=1, first=4)
    wait_until(lambda: len(recorder.bodies()) == 3, what="it goes on")
    assert recorder.attempts(b"2") == [1]


@as_consumer
def test_a_paused_group_is_given_nothing_till_it_is_resumed(stage: Stage) -> None:
    recorder = Recorder()
    app = share(stage, recorder, visibility_timeout_s=30.0)
    stage.send_numbers(keys=2, each=2)
    stage.wait_settled()
    pause_group(runtime_of(stage.database, actor="test"), stage.topic, "g")
    wait_until(lambda: shared_member(app).owned() == {}, what="it reads nothing")
    stage.send_numbers(keys=2, each=2, first=3)
    [status] = group_statuses(stage.runtime, stage.topic)
    assert (status.lag, status.facts.alive) == (4, 1)
    assert len(recorder.begun) == 4
    resume_group(runtime_of(stage.database, actor="test"), stage.topic, "g")
    stage.wait_settled()
    assert len(recorder.ended) == 8


@as_consumer
def test_an_async_handler_shares_too_and_its_time_limit_is_a_failed_attempt(stage: Stage) -> None:
    done: list[bytes] = []

    async def handle(body: bytes, ctx: Context) -> None:
        if body == b"2" and ctx.attempt == 1:
            await asyncio.sleep(20)
        done.append(body)

    app = share(stage, handle, time_limit_s=0.2, visibility_timeout_s=30.0)
    stage.send_numbers(keys=3, each=4)
    stage.wait_settled()
    assert sorted(done) == sorted([b"1", b"2", b"3", b"4"] * 3)
    assert shared_member(app).stats.timed_out == 3
