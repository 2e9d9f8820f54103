"""Settling: cases 38, 39, 50 to 54 and 77 with whole members, on every Redis."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import Any

import pytest

from mqlayer import Context
from mqlayer.consuming.ordered import settler
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition
from mqlayer.domain.message import Record
from mqlayer.domain.offsets import OffsetRange
from mqlayer.domain.routing import lp_of
from mqlayer.errors import AlreadyApplied, StaleOwner, StoreUnavailable
from mqlayer.failpoints import arm, disarm_all
from mqlayer.groups.members import join
from mqlayer.logs import event_of
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Command
from mqlayer.redis.partition_scripts import (
    Fenced,
    LockHolder,
    LockKept,
    LockTaken,
    Refused,
    acquire_command,
    acquire_reply,
    attempt_command,
    attempt_reply,
    failures_of,
    fence_command,
    recount_command,
    release_command,
    settle_command,
    settle_reply,
)
from tests.fixtures.consumers import Recorder, Stage, StartStage, member_of
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.servers import StartRedis
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.route_ranges import range_of


def hold_all(go_on: threading.Event) -> Recorder:
    """Return a handler that lets a message end when the test says so."""

    def act(_body: bytes, _ctx: Context) -> None:
        go_on.wait(30)

    return Recorder(act)


def keys_of(stage: Stage, partition: int, count: int) -> list[str]:
    """Return some keys of one partition."""
    names = (f"key-{number}" for number in itertools.count())
    return list(
        itertools.islice((k for k in names if range_of(stage.route, lp_of(k.encode())).partition == partition), count)
    )


def test_while_a_key_is_in_hand_nothing_more_of_it_is_given_out(every_stage: Stage) -> None:
    """Case 50, for keys: m2 and m3 wait until m1 is handled, and a second member gets nothing of the partition."""
    go_on = threading.Event()
    first, second = hold_all(go_on), Recorder()
    partition = every_stage.partitions[0]
    [key] = keys_of(every_stage, partition, 1)
    every_stage.send([(key, b"1"), (key, b"2"), (key, b"3")])
    every_stage.consume(first)
    wait_until(lambda: first.begun, what="m1 begun")
    every_stage.consume(second)
    wait_until(lambda: len(set(every_stage.owners().values())) == 2, timeout_s=20, what="one partition each")
    assert len(first.begun) == 1
    assert not [handled for handled in second.begun if handled.partition == partition]
    go_on.set()
    every_stage.wait_settled()
    assert sorted(first.bodies() + second.bodies()) == [b"1", b"2", b"3"]


def test_committed_waits_for_the_head_and_then_jumps(every_stage: Stage) -> None:
    """Case 51: m2 and m3 are settled before m1; committed stays before m1, then passes m3."""
    go_on = threading.Event()
    key_of_head, *others = keys_of(every_stage, every_stage.partitions[0], 3)

    def act(_body: bytes, ctx: Context) -> None:
        if ctx.key == key_of_head:
            go_on.wait(30)

    recorder = Recorder(act)
    every_stage.send([(key_of_head, b"1"), (others[0], b"2"), (others[1], b"3")])
    app = every_stage.consume(recorder)
    wait_until(lambda: member_of(app).stats.settled == 2, what="m2 and m3 settled")
    [partition] = {handled.partition for handled in recorder.begun}
    assert every_stage.position(partition) == (1, 4)
    go_on.set()
    wait_until(lambda: every_stage.position(partition) == (4, 4), what="committed behind m3")


def test_what_was_settled_behind_an_unsettled_head_is_not_delivered_again(every_stage: Stage) -> None:
    """Case 52: after the owner is gone m1 comes again; m2 and m3, settled already, are skipped."""
    go_on = threading.Event()
    key_of_head, *others = keys_of(every_stage, every_stage.partitions[0], 3)

    def act(_body: bytes, ctx: Context) -> None:
        if ctx.key == key_of_head:
            go_on.wait(30)

    first, second = Recorder(act), Recorder()
    every_stage.send([(key_of_head, b"1"), *((others[number % 2], b"%d" % number) for number in range(2, 2_000))])
    app = every_stage.consume(first)
    wait_until(lambda: member_of(app).stats.settled == 1_998, timeout_s=20, what="all but m1 settled")
    every_stage.send([(others[0], b"2000")])
    wait_until(lambda: member_of(app).stats.settled == 1_999, timeout_s=20, what="all but m1 settled")
    assert not app.stop(timeout_s=0.1)
    every_stage.consume(second)
    every_stage.wait_settled()
    assert second.bodies() == [b"1"]
    go_on.set()


def test_acks_of_an_earlier_owner_change_nothing(every_stage: Stage) -> None:
    """Cases 34, 38 and 53: every call under an old epoch is refused, also that of the owner's own former self."""
    every_stage.send_numbers(keys=1, each=5)
    go_on = threading.Event()
    recorder = hold_all(go_on)
    app = every_stage.consume(recorder)
    wait_until(lambda: recorder.begun, what="the first message begun")
    begun = recorder.begun[0]
    owner = member_of(app).member_id
    before = every_stage.redis.hgetall(every_stage.group_keys(begun.partition).lock)
    with every_stage.connection() as connection:
        for member, epoch in ((owner, begun.epoch - 1), ("somebody", begun.epoch), ("somebody", begun.epoch - 1)):
            old = LockHolder(every_stage.prefix, begun.partition, every_stage.group_id(), member, epoch)
            replies = connection.call(
                [
                    settle_command(connection, old, [(1, 3)]),
                    attempt_command(connection, old, 1, 9),
                    acquire_command(connection, old, start=1, afresh=True),
                    release_command(connection, old),
                ]
            )
            assert settle_reply(replies[0], "") == Fenced(begun.epoch)
            assert attempt_reply(replies[1], "") == Fenced(begun.epoch)
            assert acquire_reply(replies[2], "") == Fenced(begun.epoch)
            assert replies[3] == [b"fenced", begun.epoch]
    after = every_stage.redis.hgetall(every_stage.group_keys(begun.partition).lock)
    assert {**after, b"refreshed_at": b""} == {**before, b"refreshed_at": b""}
    go_on.set()
    every_stage.wait_settled()


def test_an_unknown_offset_is_refused_and_one_below_committed_is_harmless(every_stage: Stage) -> None:
    """Case 54, beside a living owner: nothing of it reaches what the owner does."""
    recorder = Recorder()
    every_stage.send_numbers(keys=1, each=5)
    app = every_stage.consume(recorder)
    every_stage.wait_settled()
    begun = recorder.begun[0]
    holder = LockHolder(
        every_stage.prefix, begun.partition, every_stage.group_id(), member_of(app).member_id, begun.epoch
    )
    with every_stage.connection() as connection:
        unknown, below, both = connection.call(
            [settle_command(connection, holder, ranges) for ranges in ([(6, 6)], [(1, 2)], [(1, 2), (9, 9)])]
        )
    assert settle_reply(unknown, "") == Refused("unknown", "6")
    assert settle_reply(below, "") == LockKept(6)
    assert settle_reply(both, "") == Refused("unknown", "6")
    assert every_stage.position(begun.partition) == (6, 6)


def test_the_same_member_id_started_again_gets_new_epochs_and_the_old_process_ends(
    every_stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 39."""
    go_on = threading.Event()
    first, second = hold_all(go_on), Recorder()
    every_stage.send_numbers(keys=4, each=5)
    old = every_stage.consume(first, member_id="me")
    wait_until(lambda: len(first.begun) == 4, what="messages in hand")
    new = every_stage.consume(second, member_id="me")
    every_stage.wait_settled()
    wait_until(lambda: not member_of(old).running, what="the old process ended")
    go_on.set()
    assert "member_replaced" in caplog.text
    assert member_of(new).running
    assert len(second.bodies()) == 20
    assert len(first.begun) == 4
    assert member_of(old).stats.settled == 0
    assert min(handled.epoch for handled in second.begun) > max(handled.epoch for handled in first.begun)


def test_an_old_process_never_learns_the_epochs_of_the_one_that_took_its_id(stage: Stage) -> None:
    """Else both would call themselves owner under one epoch, and every check would pass for both."""
    recorder = Recorder()
    app = stage.consume(recorder, member_id="me")
    stage.send_numbers(keys=4, each=1)
    stage.wait_settled()
    session = member_of(app)._heartbeat._session
    assert session is not None
    # As at a heartbeat between its two statements: the id is taken over before the second.
    join(stage.database, group_id=stage.group_id(), member_id="me", lease_s=5.0)
    with stage.database.connection() as connection:
        facts = {"group_id": session.group_id, "member_id": session.member_id, "session": session.session}
        rows = connection.execute(query("member_assignments"), facts).fetchall()
    assert [row[0] for row in rows] == [None]


def test_a_fenced_effect_is_there_once_though_its_ack_was_lost(every_stage: Stage) -> None:
    """Case 77: between commit and ack the member loses the partition; redelivery finds the effect and settles."""
    with kept_session(every_stage.dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE effect (body text)")

    refused: list[type[Exception]] = []

    def handle(body: str, ctx: Context) -> None:
        try:
            with kept_session(every_stage.dsn) as connection:
                ctx.fence(connection)
                connection.execute("INSERT INTO effect VALUES (%s)", [body])
        except (AlreadyApplied, StaleOwner) as error:
            refused.append(type(error))
            raise

    every_stage.send_numbers(keys=3, each=3)
    for occurrence in range(1, 200):
        arm("ack.before_send", "raise", occurrence=occurrence)
    app = every_stage.consume(handle)
    wait_until(lambda: member_of(app).stats.handled == 9, timeout_s=20, what="all handled")
    for owned in member_of(app).ownership.all():
        member_of(app).ownership.lock_lost(owned)
    # Not before: an ack that was about to be tried again would get through under the same epoch.
    wait_until(lambda: bool(refused), what="a redelivery")
    disarm_all()
    every_stage.wait_settled()
    with kept_session(every_stage.dsn) as connection:
        assert connection.execute("SELECT count(*) FROM effect").fetchone() == (9,)
    assert set(refused) == {AlreadyApplied}


def test_the_fences_of_other_partitions_are_raised_where_one_can_not_be(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """A transaction that nobody ends holds an LP of the first partition."""
    assert stage.consume(Recorder()).stop()
    with kept_session(stage.dsn, autocommit=True) as connection, kept_session(stage.dsn) as holder:
        connection.execute("DELETE FROM mqlayer_app.fence_epoch")
        holder.execute("INSERT INTO mqlayer_app.fence_epoch VALUES (%s, 0, 1)", (stage.group_id(),))
        app = stage.consume(Recorder())
        wait_until(
            lambda: {state for _, state in member_of(app).owned().values()} == {"open"}, what="both partitions open"
        )
        raised = connection.execute("SELECT count(*)::int, min(lp)::int FROM mqlayer_app.fence_epoch").fetchone()
    assert raised == (512, 512)
    told = [record.__dict__["partition"] for record in caplog.records if event_of(record) == "fence_not_raised"]
    assert told == [stage.partitions[0]]


def test_the_fence_called_twice_for_a_message_is_a_fault_and_loses_no_effect(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """The second call would answer "applied", the transaction would roll back, and the message would be settled."""
    with kept_session(stage.dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE effect (body text)")
    twice = threading.Event()
    twice.set()

    def handle(body: str, ctx: Context) -> None:
        with kept_session(stage.dsn) as connection:
            ctx.fence(connection)
            connection.execute("INSERT INTO effect VALUES (%s)", [body])
            if twice.is_set():
                ctx.fence(connection)

    stage.send([("k", b"1")])
    with caplog.at_level(logging.WARNING):
        stage.consume(handle)
        wait_until(lambda: "handler_failed" in caplog.text, what="the fault")
    twice.clear()
    stage.wait_settled()
    with kept_session(stage.dsn) as connection:
        assert connection.execute("SELECT count(*) FROM effect").fetchone() == (1,)


def test_acks_that_could_not_be_sent_are_sent_again(every_stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever fails between taking acks and their answer, not one is lost."""
    recorder = Recorder()
    every_stage.send_numbers(keys=10, each=100)
    for occurrence in (1, 2, 4):
        arm("ack.before_send", "raise", occurrence=occurrence)
        arm("ack.after_send", "raise", occurrence=occurrence)
    app = every_stage.consume(recorder)
    every_stage.wait_settled()
    assert "settling_failed" in caplog.text
    assert len(recorder.begun) == 1_000
    wait_until(lambda: member_of(app).stats.settled == 1_000, what="counted as settled")
    assert {(h.room.count, h.room.bytes) for h in member_of(app).ownership.all()} == {(0, 0)}


def test_a_partition_that_always_has_acks_to_send_leaves_the_others_their_turn(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settler of a node sends for each partition once a pass, whatever comes in meanwhile."""
    busy, other = stage.partitions
    app = stage.consume(Recorder())
    member = member_of(app)
    wait_until(lambda: len(member.owned()) == 2, what="both partitions held")
    turns = itertools.count()
    acknowledged = member.dispatcher.settled

    def never_done(owned: OwnedPartition, records: list[Record], committed: int, unmatched: list[OffsetRange]) -> None:
        if owned.partition == busy:
            owned.results.handled.extend(records)
            next(turns)
        else:
            acknowledged(owned, records, committed, unmatched)

    monkeypatch.setattr(member.dispatcher, "settled", never_done)
    stage.send((key, b"1") for key in keys_of(stage, busy, 1))
    wait_until(lambda: stage.position(busy) == (2, 2), what="the busy one settled the first time")
    stage.send((key, b"1") for key in keys_of(stage, other, 1))
    wait_until(lambda: stage.position(other) == (2, 2), what="the other's ack sent")
    monkeypatch.undo()
    assert next(turns) > 1
    wait_until(lambda: member.stats.settled > 1, what="an end of it")


def test_a_reader_that_fails_goes_on(every_stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    for name in ("acquire.before_send", "acquire.after_send", "read.after_reply"):
        arm(name, "raise")
    every_stage.consume(recorder)
    every_stage.send_numbers(keys=10, each=10)
    every_stage.wait_settled()
    assert "reading_failed" in caplog.text
    recorder.assert_in_order()
    assert len(recorder.begun) == 100


@pytest.mark.full
def test_a_heartbeat_that_fails_goes_on(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    app = stage.consume(recorder)
    heartbeat = member_of(app)._heartbeat

    def fail(_session: object, _answer: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(member_of(app).assignments, "follow", fail)
    wait_until(lambda: "ZeroDivisionError" in str([r.__dict__ for r in caplog.records]), what="the failure told")
    monkeypatch.undo()
    before = heartbeat.lease.until
    wait_until(lambda: heartbeat.lease.until > before, what="a heartbeat later")
    stage.send_numbers(keys=3, each=3)
    stage.wait_settled()


def test_scripts_that_the_server_forgot_are_loaded_again(every_stage: Stage) -> None:
    """SCRIPT FLUSH while a member runs costs nothing but a repeated call."""
    recorder = Recorder()
    every_stage.consume(recorder)
    for first in range(1, 41, 10):
        every_stage.redis.script_flush()
        every_stage.send_numbers(keys=10, each=10, first=first)
    every_stage.wait_settled()
    recorder.assert_in_order()
    assert len(recorder.begun) == 400


def test_records_that_somebody_removed_are_told_and_never_settled(
    every_stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """A hole is no part of the protocol: what is missing must not count as handled."""
    every_stage.send([("k", b"%d" % number) for number in range(1, 6)])
    [partition] = [p for p in every_stage.partitions if every_stage.redis.xlen(every_stage.keys(p).log.decode())]
    every_stage.redis.xdel(every_stage.keys(partition).log.decode(), "3-0")
    recorder = Recorder()
    every_stage.consume(recorder)
    wait_until(lambda: len(recorder.ended) == 4, what="the others handled")
    wait_until(lambda: every_stage.position(partition) == (3, 6), what="committed before the hole")
    assert "records_missing" in caplog.text


def test_a_lock_that_the_node_forgot_is_taken_anew_and_what_is_not_settled_comes_again(
    every_stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 42, second half: the next epoch is higher than any before, since Postgres gives it out."""
    recorder = Recorder()
    every_stage.send_numbers(keys=4, each=5)
    every_stage.consume(recorder)
    every_stage.wait_settled()
    used = max(epoch for _, _, epoch, _ in every_stage.assignments())
    for partition in every_stage.partitions:
        keys = every_stage.group_keys(partition)
        every_stage.redis.delete(keys.lock, keys.acks, keys.attempts)
    every_stage.send_numbers(keys=4, each=5, first=6)
    every_stage.wait_settled()
    assert "lock_lost" in caplog.text
    recorder.assert_in_order()
    assert recorder.count() == 40
    for partition in every_stage.partitions:
        assert int(every_stage.redis.hget(every_stage.group_keys(partition).lock, "epoch") or 0) > used


@pytest.mark.parametrize("lost", some_of(["lock", "acks", "lock+acks"], 3))
@pytest.mark.parametrize("running", some_of([True, False], 2), ids=["under its owner", "between owners"])
def test_what_was_never_acknowledged_comes_again_after_the_loss_of_the_lock_alone(
    every_stage: Stage, lost: str, running: bool
) -> None:
    """Case 42: bits of a bitmap whose lock is gone say nothing, nor does a lock whose bitmap is gone.

    Four messages are at work, far apart; all between them is settled above committed.
    """
    [partition, _] = every_stage.partitions
    keys = keys_of(every_stage, partition, 40)
    stuck, others = keys[::13], [key for number, key in enumerate(keys) if number % 13]
    released = threading.Event()

    def act(_body: bytes, ctx: Context) -> None:
        if ctx.key in stuck and ctx.body == b"2":
            released.wait(30)

    # What comes first moves committed, and with it where the bitmap begins.
    every_stage.send((key, b"1") for key in keys)
    first, second = Recorder(act), Recorder()
    app = every_stage.consume(first, drain_timeout_s=0.1)
    every_stage.wait_settled()
    every_stage.send((key, body) for body in (b"2", b"3") for key in keys)
    stats = member_of(app).stats
    wait_until(lambda: stats.settled == len(keys) + 2 * len(others), what="all is settled but what is at work")
    committed = every_stage.position(partition).committed
    used = max(epoch for _, _, epoch, _ in every_stage.assignments())
    if not running:
        app.stop()
    group = every_stage.group_keys(partition)
    every_stage.redis.delete(*(getattr(group, name) for name in lost.split("+")))
    if running:
        every_stage.send([(others[0], b"4")])
        wait_until(lambda: (others[0], b"4") in {(one.key, one.body) for one in first.ended}, what="it goes on")
        app.stop()
    every_stage.consume(second)
    every_stage.wait_settled()
    handled = {(one.key, one.body) for one in second.ended}
    assert {(key, body) for key in stuck for body in (b"2", b"3")} <= handled
    assert committed == 41, "nothing is settled above committed"
    assert int(every_stage.redis.hget(group.lock, "epoch") or 0) > used
    second.assert_in_order()
    released.set()


def test_taking_twice_under_one_epoch_answers_the_same(every_stage: Stage) -> None:
    """The answer to the taking may be lost: asked again, the node tells it again."""
    every_stage.send_numbers(keys=1, each=3)
    every_stage.consume(Recorder(), group="g").stop()
    [partition] = [p for p in every_stage.partitions if every_stage.position(p).next == 4]
    holder = LockHolder(every_stage.prefix, partition, every_stage.group_id(), "next-one", 1_000_000)
    with every_stage.connection() as connection:
        command = acquire_command(connection, holder, start=1, afresh=True)
        first, second = (acquire_reply(reply, "") for reply in connection.call([command, command]))
    assert isinstance(first, LockTaken)
    assert first == second


def test_an_owner_whose_epoch_the_node_refuses_gets_a_higher_one(
    every_stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a node has seen a higher epoch than Postgres gave out, nobody would ever own the partition again."""
    recorder = Recorder()
    app = every_stage.consume(recorder)
    every_stage.send_numbers(keys=4, each=5)
    every_stage.wait_settled()
    with every_stage.connection() as connection:
        raised = {p: epoch + 3 for p, (epoch, _) in member_of(app).owned().items()}
        connection.call(
            [fence_command(connection, every_stage.prefix, p, every_stage.group_id(), e) for p, e in raised.items()]
        )
    every_stage.send_numbers(keys=4, each=5, first=6)
    every_stage.wait_settled()
    assert "partition_lost" in caplog.text
    recorder.assert_in_order()
    assert all(epoch >= raised[p] for p, (epoch, _) in member_of(app).owned().items())


def test_locks_offsets_and_attempts_survive_a_restart_of_their_node(
    start_stage: StartStage, start_redis: StartRedis
) -> None:
    """Case 42, first half."""
    server = start_redis()
    stage = start_stage(server.url, partitions=1)
    key_of_head, other = keys_of(stage, stage.partitions[0], 2)

    def act(_body: bytes, ctx: Context) -> None:
        if ctx.key == key_of_head:
            raise ValueError

    stage.send([(key_of_head, b"1"), (other, b"2"), (other, b"3")])
    app = stage.consume(Recorder(act), backoff_s=(0.01, 9.0))
    wait_until(lambda: member_of(app).stats.settled == 2, what="the others settled")
    wait_until(lambda: member_of(app).stats.failed == 2, what="two attempts")
    assert app.stop()
    keys = stage.group_keys(stage.partitions[0])

    def kept() -> list[object]:
        return [
            stage.redis.hgetall(keys.lock.decode()),
            stage.redis.get(keys.acks),
            stage.redis.hgetall(keys.attempts.decode()),
            stage.redis.hgetall(stage.keys(stage.partitions[0]).meta.decode()),
        ]

    before = kept()
    server.kill()
    server.start()
    assert kept() == before
    noted = stage.redis.hget(keys.attempts.decode(), "1")
    assert isinstance(noted, bytes)
    assert failures_of(noted).attempts == 2


@pytest.mark.parametrize("fails", [False, True], ids=["recounted", "a recount fails"])
def test_a_settlement_of_offsets_that_the_node_does_not_know_is_made_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """An append that was cut off left its record, but not its number."""
    partition = stage.partitions[0]
    [key] = keys_of(stage, partition, 1)
    stage.send([(key, b"1")])
    stage.redis.hincrby(stage.keys(partition).meta, "next", -1)
    failures = [StoreUnavailable("node", "planned")] if fails else []

    def recount(*arguments: Any) -> Command:
        if failures:
            raise failures.pop()
        return recount_command(*arguments)

    monkeypatch.setattr(settler, "recount_command", recount)
    recorder = Recorder()
    stage.consume(recorder)
    wait_until(lambda: stage.position(partition) == (2, 2), timeout_s=20, what="it is settled")
    assert not failures
    assert set(recorder.bodies()) == {b"1"}
