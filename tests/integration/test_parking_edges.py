"""Parked keys when something else happens at that moment: an operator's act, a seek, a limit, a long handler."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from mqlayer import Context, Event, MemberOptions
from mqlayer.domain.message import Record
from mqlayer.domain.routing import PartitionId, lp_of
from mqlayer.errors import PauseKey
from mqlayer.groups.seek import apply_seek, planned_seek
from mqlayer.parking import KeyEntry, KeyRef, ParkingBatch, ParkingStore, Span
from mqlayer.postgres.queries import query
from mqlayer.redelivery.operator_actions import discard_parked
from mqlayer.runtime.route_cache import RouteCache
from tests.fixtures.consumers import Recorder, Stage, StartStage
from tests.fixtures.wait import wait_until
from tests.proof.parking_shop import LATER_S, Fault, ParkingShop, parked, release, rows
from tests.proof.runtimes import runtime_of


@pytest.fixture
def stage(start_stage: StartStage, redis_url: str) -> Stage:
    """A topic of one partition."""
    return start_stage(redis_url, partitions=1)


def test_what_was_discarded_is_not_handled_by_an_owner_that_has_yet_to_settle_it(stage: Stage) -> None:
    """Case 67: the owner died between parking and settling, and an operator discards before the next one reads."""
    stage.send([("first", b"0"), ("k", b"1"), ("k", b"2")])
    app = stage.consume(ParkingShop("k").recorder, backoff_s=(LATER_S,))
    stage.wait_settled()
    app.stop()
    (partition,) = stage.partitions
    stage.redis.hset(stage.group_keys(partition).lock, mapping={"committed": 1, "base": 1})
    begun, discarded = threading.Event(), threading.Event()

    def act(body: bytes, ctx: Context) -> None:
        if ctx.key == "first":
            begun.set()
            assert discarded.wait(10)

    recorder = Recorder(act)
    # It reads one message at a time: those of the key come when the first one is settled.
    stage.consume(recorder, backoff_s=(LATER_S,), prefetch_count=1, concurrency=1)
    assert begun.wait(10)
    assert discard_parked(runtime_of(stage.database, actor="test"), stage.topic, "g", key="k", reason="a test's") == 2
    stage.send([("k", b"3")])
    discarded.set()
    stage.wait_settled()
    assert recorder.bodies("k") == [b"3"]
    assert len(rows(stage, "SELECT FROM mqlayer.dead_message")) == 2


def test_what_was_discarded_is_not_parked_again_where_the_answer_to_parking_it_was_lost(stage: Stage) -> None:
    """Case 67: its owner asks again, and would have it dead and parked."""
    stage.consume(Recorder(), backoff_s=(LATER_S,))
    wait_until(lambda: stage.assignments()[0][1] is not None, what="an owner")
    partition, member_id, epoch, _ = stage.assignments()[0]
    ref = KeyRef(int(lp_of(b"k")), b"k")
    messages = [(ref, Record(seq, b"1:%d:%d:0" % (ref.lp, seq), b"k", b"body")) for seq in (1, 2)]
    page = ParkingBatch(entries=[KeyEntry(ref, "exhausted", None, 1)], messages=messages)
    store = ParkingStore(stage.database, stage.group_id(), member_id or "")
    assert not store.write(PartitionId(partition), epoch, page).unparked
    assert discard_parked(runtime_of(stage.database, actor="test"), stage.topic, "g", key="k", reason="a test's") == 2
    assert store.write(PartitionId(partition), epoch, page).unparked == {ref}
    assert not rows(stage, "SELECT FROM mqlayer.parked_key")
    assert store.dead(Span(PartitionId(partition), 0, 1024, 1)) == {record.identity for _, record in messages}


def test_a_head_that_was_discarded_is_not_parked_again_by_who_has_read_it(stage: Stage) -> None:
    """Case 67: its key is parked still, for what follows. Found by the model, `docs/model`: park-dead."""
    stage.consume(Recorder(), backoff_s=(LATER_S,))
    wait_until(lambda: stage.assignments()[0][1] is not None, what="an owner")
    partition, member_id, epoch, _ = stage.assignments()[0]
    ref = KeyRef(int(lp_of(b"k")), b"k")
    messages = [(ref, Record(seq, b"1:%d:%d:0" % (ref.lp, seq), b"k", b"body")) for seq in (1, 2)]
    store = ParkingStore(stage.database, stage.group_id(), member_id or "")
    store.write(PartitionId(partition), epoch, ParkingBatch([KeyEntry(ref, "exhausted", None, 1)], messages))
    gone = discard_parked(
        runtime_of(stage.database, actor="test"), stage.topic, "g", key="k", head=True, reason="a test's"
    )
    assert gone == 1
    later = (ref, Record(3, b"1:%d:3:0" % ref.lp, b"k", b"body"))
    written = store.write(PartitionId(partition), epoch, ParkingBatch(messages=[*messages, later]))
    # To be settled, all three: one is dead, the others are parked.
    assert not written.unparked
    assert not written.refused_messages
    assert parked(stage) == {"k": [2, 3]}
    assert rows(stage, "SELECT seq FROM mqlayer.dead_message") == [(1,)]


def test_a_key_that_finds_no_room_among_the_parked_ones_rests_as_long_as_it_was_told(stage: Stage) -> None:
    """It waits in place, and an event says so."""
    events: list[Event] = []

    def act(_body: bytes, ctx: Context) -> None:
        raise Fault("no stock") if ctx.key == "a" else PauseKey(11.0)

    app = stage.app()
    app.consumer(stage.topic, group="g", backoff_s=(LATER_S,), options=MemberOptions(parked_keys=1))(Recorder(act))
    app.on_event(events.append)
    stage.send([("a", b"1")])
    app.start()
    wait_until(lambda: [e for e in events if e.kind == "parked"], what="one parked")
    stage.send([("b", b"2")])
    wait_until(lambda: [e for e in events if e.kind == "paused" and e.lp == lp_of(b"b")], what="the other to rest")
    told = [(event.kind, event.wait_s) for event in events if event.lp == lp_of(b"b")]
    assert told == [("parking_full", None), ("paused", 11.0)]


def test_what_comes_again_in_front_of_a_parked_key_has_its_own_attempts(stage: Stage) -> None:
    """A seek brings messages back that were handled; what was counted is of the one that failed."""
    fails = {b"3"}

    def act(body: bytes, _ctx: Context) -> None:
        if body in fails:
            raise Fault("no stock")

    recorder = Recorder(act)
    stage.send([("k", b"1"), ("k", b"2"), ("k", b"3"), ("k", b"4")])
    stage.consume(recorder, backoff_s=(0.01, 0.01, LATER_S))
    stage.wait_settled()
    assert parked(stage) == {"k": [3, 4]}
    with closing(RouteCache(stage.database)) as routes:
        plan = planned_seek(stage.runtime, routes, topic=stage.topic, name="g", to="earliest")
        apply_seek(runtime_of(stage.database, stage.prefix, actor="test"), plan)
    wait_until(lambda: parked(stage) == {"k": [1, 2, 3, 4]}, what="all of it parked")
    stage.wait_settled()
    fails.clear()
    assert rows(stage, "SELECT attempts FROM mqlayer.parked_key") == [(0,)]
    release(stage)
    wait_until(lambda: recorder.bodies()[-1:] == [b"4"], what="all handled")
    assert recorder.bodies() == [b"1", b"2", b"1", b"2", b"3", b"4"]


def test_a_parked_key_that_an_owner_has_in_hand_is_not_overdue(stage: Stage) -> None:
    """Else a long line or handler has its group told every few seconds, and the doctor say that nobody tries it."""
    begun, mended = threading.Event(), threading.Event()
    broken = {b"1"}

    def act(body: bytes, _ctx: Context) -> None:
        if body in broken:
            raise Fault("no stock")
        begun.set()
        assert mended.wait(10)

    stage.send([("k", b"1")])
    stage.consume(Recorder(act), backoff_s=(LATER_S,))
    stage.wait_settled()
    broken.clear()
    release(stage)
    assert begun.wait(10)
    due_for = "SELECT FROM mqlayer.parked_key WHERE due_at < clock_timestamp() - interval '0.1 s'"
    wait_until(lambda: rows(stage, due_for), what="due for a while")
    with stage.database.connection() as connection:
        assert connection.execute(query("parked_overdue"), {"for_s": 0.1}).fetchall() == []
        assert [row[-1] for row in connection.execute(query("check_parked")).fetchall()] == [None]
    mended.set()
