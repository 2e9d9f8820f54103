"""A key that fails for long waits in Postgres with all that follows it, and nothing else waits for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mqlayer import Context, Event
from mqlayer.domain.message import Identity
from mqlayer.domain.routing import PartitionId
from mqlayer.errors import PauseKey, Reject, RetryLater, Skip
from mqlayer.groups.admin import set_group
from mqlayer.parking import KeyEntry, KeyRef, KeyUpdate, ParkingBatch, ParkingStore
from tests.fixtures.consumers import Recorder, Stage, member_of
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.parking_shop import LATER_S, Fault, ParkingShop, parked, release, rows
from tests.proof.runtimes import runtime_of

pytestmark = pytest.mark.usefixtures("as_consumer")


def test_a_key_that_waits_long_is_parked_and_the_others_go_on(stage: Stage) -> None:
    """Case 64."""
    shop = ParkingShop("key-1")
    stage.send_numbers(4, 10)
    app = stage.consume(shop.recorder, backoff_s=(LATER_S,))
    stage.wait_settled()
    stage.send_numbers(4, 10, first=11)
    stage.wait_settled()
    assert {key: len(shop.recorder.bodies(key)) for key in ("key-0", "key-1", "key-2", "key-3")} == {
        "key-0": 20, "key-1": 0, "key-2": 20, "key-3": 20,
    }  # fmt: skip
    assert len(parked(stage)["key-1"]) == 20
    # The member counts them a moment after their settlement.
    wait_until(lambda: member_of(app).stats.parked == 20, what="all counted")
    shop.broken.clear()
    release(stage)
    wait_until(lambda: len(shop.recorder.bodies("key-1")) == 20, what="the parked key handled")
    wait_until(lambda: not rows(stage, "SELECT FROM mqlayer.parked_key"), what="nothing parked")
    stage.send_numbers(4, 5, first=21)
    stage.wait_settled()
    shop.recorder.assert_in_order()
    assert len(shop.recorder.bodies("key-1")) == len(set(shop.recorder.bodies("key-1"))) == 25


def test_a_parked_key_is_tried_again_when_it_is_due(stage: Stage) -> None:
    """Attempts go on where they were, each after its wait; what follows the failing message comes after it."""
    waits: list[int] = []

    def act(body: bytes, ctx: Context) -> None:
        if body == b"1" and ctx.attempt < 5:
            waits.append(ctx.attempt)
            raise RetryLater(0.05) if ctx.attempt == 1 else PauseOnce()

    class PauseOnce(Fault):
        pass

    recorder = Recorder(act)
    stage.send([("k", b"1"), ("k", b"2")])
    stage.consume(recorder, backoff_s=(0.1,), policy="park")
    wait_until(lambda: recorder.bodies() == [b"1", b"2"], what="both handled")
    assert recorder.attempts(b"1") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("error", [Fault("no stock"), Reject("not for us")])
def test_attempts_that_run_out_leave_the_key_parked(stage: Stage, error: Exception) -> None:
    """Case 65, the policy park: until somebody releases it, however long that takes."""
    shop = ParkingShop("key-1", error=error)
    stage.send_numbers(3, 5)
    stage.consume(shop.recorder, backoff_s=(0.01,), attempt_limit=2, policy="park")
    stage.wait_settled()
    tries = 1 if isinstance(error, Reject) else 2
    assert shop.recorder.attempts(b"1")[: tries + 2].count(2) == tries - 1
    cause = "rejected" if tries == 1 else "exhausted"
    wait_until(
        lambda: rows(stage, "SELECT cause, due_at, attempts FROM mqlayer.parked_key") == [(cause, None, tries)],
        what="parked for good",
    )
    noted = "SELECT attempt, error FROM mqlayer.failed_attempt ORDER BY 1"
    wait_until(lambda: [row[0] for row in rows(stage, noted)] == list(range(1, tries + 1)), what="attempts noted")
    assert all(str(error) in text for _, text in rows(stage, noted))
    assert parked(stage) == {"key-1": [1, 2, 3, 4, 5]}
    shop.broken.clear()
    release(stage)
    wait_until(lambda: len(shop.recorder.bodies("key-1")) == 5, what="the parked key handled")
    shop.recorder.assert_in_order()


def test_a_dead_letter_leaves_and_its_key_goes_on(stage: Stage) -> None:
    """Case 65, the policy dead_letter."""

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"3":
            raise Fault("never")

    recorder = Recorder(act)
    stage.send([("k", b"%d" % number) for number in range(1, 6)])
    app = stage.consume(recorder, backoff_s=(0.01,), attempt_limit=3, policy="dead_letter")
    stage.wait_settled()
    wait_until(lambda: recorder.bodies() == [b"1", b"2", b"4", b"5"], what="the others handled")
    assert recorder.attempts(b"3") == [1, 2, 3]
    [(cause, reason, attempts, body)] = rows(stage, "SELECT cause, reason, attempts, body FROM mqlayer.dead_message")
    assert (cause, attempts, body) == ("exhausted", 3, b"3")
    assert "never" in reason
    # The member counts it a moment after its settlement.
    wait_until(lambda: member_of(app).stats.dead == 1, what="it is counted")


@pytest.mark.parametrize(("policy", "error"), [("skip", Fault("never")), ("park", Skip("not ours"))])
def test_what_is_skipped_leaves_a_written_reason(stage: Stage, policy: str, error: Exception) -> None:
    def act(body: bytes, _ctx: Context) -> None:
        if body == b"1":
            raise error

    recorder = Recorder(act)
    stage.send([("k", b"1"), ("k", b"2")])
    stage.consume(recorder, backoff_s=(0.01,), attempt_limit=2, policy=policy)
    stage.wait_settled()
    [(cause, reason, body)] = rows(stage, "SELECT cause, reason, body FROM mqlayer.dead_message")
    assert (cause, body) == ("skipped", None)
    assert str(error) in reason or "not ours" in reason
    assert recorder.bodies() == [b"2"]


def test_a_group_that_blocks_waits_for_ever_until_it_is_told_otherwise(stage: Stage) -> None:
    """Case 65, the policy block, and switching the policy while it blocks."""
    shop = ParkingShop("k")
    stage.send([("k", b"1"), ("k", b"2")])
    stage.consume(shop.recorder, backoff_s=(0.01, LATER_S), attempt_limit=2, policy="block")
    wait_until(lambda: shop.recorder.attempts(b"1") == [1, 2], what="attempts run out")
    assert not rows(stage, "SELECT FROM mqlayer.parked_key")
    assert not stage.all_settled()
    set_group(runtime_of(stage.database, actor="test"), stage.topic, "g", policy="dead_letter")
    wait_until(lambda: len(rows(stage, "SELECT FROM mqlayer.dead_message")) == 2, what="both dead", timeout_s=20)
    stage.wait_settled()
    assert shop.recorder.attempts(b"1") == [1, 2, 3]


def test_a_key_rests_when_its_handler_says_so(stage: Stage) -> None:
    """PauseKey costs no attempt."""
    paused = threading.Event()

    def act(body: bytes, ctx: Context) -> None:
        if body == b"1" and not paused.is_set():
            paused.set()
            raise PauseKey(30.0)
        assert ctx.attempt == 1

    recorder = Recorder(act)
    stage.send([("k", b"1"), ("k", b"2"), ("other", b"3")])
    stage.consume(recorder)
    stage.wait_settled()
    [(cause, attempts)] = rows(stage, "SELECT cause, attempts FROM mqlayer.parked_key")
    assert (cause, attempts) == ("paused", 0)
    assert recorder.bodies() == [b"3"]
    release(stage)
    wait_until(lambda: recorder.bodies() == [b"3", b"1", b"2"], what="the key handled")


def test_messages_that_stand_alone_are_parked_alone(stage: Stage) -> None:
    """Without a key, or in a group that does not order: nothing waits for the one that fails."""
    shop = ParkingShop("k")
    stage.send([("k", b"1"), ("k", b"2"), (None, b"3"), ("other", b"4")])
    stage.consume(shop.recorder, backoff_s=(LATER_S,), ordered=False)
    stage.wait_settled()
    assert sorted(shop.recorder.bodies()) == [b"3", b"4"]
    assert len(rows(stage, "SELECT FROM mqlayer.parked_key")) == 2
    shop.broken.clear()
    release(stage)
    wait_until(lambda: sorted(shop.recorder.bodies()) == [b"1", b"2", b"3", b"4"], what="all handled")
    wait_until(lambda: not rows(stage, "SELECT FROM mqlayer.parked_key"), what="nothing parked")


@pytest.mark.parametrize("error", some_of([Reject("a\x00b"), Reject("\ud800"), Fault("a\x00b"), Fault("\ud800")], 2))
def test_whatever_an_error_says_can_be_kept(stage: Stage, error: Exception) -> None:
    """Postgres takes neither NUL nor half of a pair: it would be sent for ever, and nothing else be parked."""
    shop = ParkingShop("k", error=error)
    stage.send([("k", b"1"), ("other", b"2")])
    stage.consume(shop.recorder, backoff_s=(0.01,), attempt_limit=2, policy="dead_letter")
    stage.wait_settled()
    assert rows(stage, "SELECT body FROM mqlayer.dead_message") == [(b"1",)]
    wait_until(lambda: rows(stage, "SELECT FROM mqlayer.failed_attempt"), what="noted")


def test_an_application_hears_and_counts_what_fails(stage: Stage) -> None:
    """Each event names what it is about, and never a key or a body; a hook that raises changes nothing."""

    def act(body: bytes, _ctx: Context) -> None:
        if body in fate:
            raise fate[body]

    fate: dict[bytes, Exception] = {b"1": Reject("no"), b"2": Skip("no"), b"3": RetryLater(0.01)}
    events: list[Event] = []
    app = stage.app()
    app.consumer(stage.topic, group="g", policy="dead_letter", attempt_limit=2)(Recorder(act))

    @app.on_event
    def note(event: Event) -> None:
        events.append(event)
        raise Fault("a hook's own")

    stage.send([("a", b"1"), ("b", b"2"), ("c", b"3")])
    app.start()
    wait_until(lambda: len(events) == 4, what="four events")
    stage.wait_settled()
    told = {(event.kind, event.cause, event.attempts) for event in events}
    assert told == {("dead", "rejected", 1), ("skipped", "skipped", 0), ("failed", "", 1), ("dead", "exhausted", 2)}
    assert all(event.seq == 1 and (event.topic, event.group) == ("orders", "g") for event in events)
    counts = app.counts()["orders", "g"]
    assert (counts.failed, counts.dead, counts.skipped) == (3, 2, 1)


def test_an_owner_takes_several_keys_in_the_order_of_operators(stage: Stage) -> None:
    """Else each would wait for a key that the other one has."""
    shop = ParkingShop("key-0", "key-1")
    stage.send_numbers(2, 1)
    app = stage.consume(shop.recorder, backoff_s=(LATER_S,))
    stage.wait_settled()
    partition, member_id, epoch, _ = stage.assignments()[0]
    parked_there = "SELECT lp, name, source, lp, seq FROM mqlayer.parked_message ORDER BY lp, name"
    first, last = ((KeyRef(*row[:2]), Identity(*row[2:])) for row in rows(stage, parked_there))
    waits = [KeyUpdate(ref, entry=KeyEntry(ref, "retry", LATER_S, 2), failed=failed) for ref, failed in (last, first)]
    store = ParkingStore(stage.database, stage.group_id(), member_of(app).member_id)
    assert member_id == member_of(app).member_id
    hold = "SELECT FROM mqlayer.parked_key WHERE lp = %s AND name = %s FOR UPDATE"
    with kept_session(stage.dsn) as operator, ThreadPoolExecutor(1) as pool:
        operator.execute("SET lock_timeout = '300ms'")
        operator.execute(hold, first[0])
        written = pool.submit(store.write, PartitionId(partition), epoch, ParkingBatch(updates=waits))
        waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        wait_until(lambda: rows(stage, waiting), what="the owner waits")
        operator.execute(hold, last[0])
        operator.commit()
        written.result(10)
    assert rows(stage, "SELECT attempts FROM mqlayer.parked_key") == [(2,), (2,)]
