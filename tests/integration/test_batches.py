"""Batch handlers: of distinct keys, of one key, with partial success; cases 36, 37, 50, 58, 64 to 66, 71."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mqlayer import App, Batch, BatchOf, PauseKey, Reject, RetryLater
from mqlayer.consuming.ordered.workers import TIME_SLICE_S
from mqlayer.errors import Conflict, InvalidInput
from mqlayer.redelivery import pause_key, release_parked
from tests.fixtures.consumers import Stage, member_of
from tests.fixtures.failed_messages import Failing
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

pytestmark = pytest.mark.usefixtures("as_consumer")

DISTINCT = BatchOf("distinct", limit=50)
OF_KEY = BatchOf("key", limit=20)

Given = list[tuple[str | None, bytes, int]]


class Batches:
    """A batch handler that notes what it is given, does what the test says, and sees whether a key runs twice."""

    def __init__(self, act: Callable[[Batch[bytes]], None] = lambda batch: None) -> None:
        self.begun: list[Given] = []
        self.done: list[Given] = []
        self.overlaps: list[str | None] = []
        self._act = act
        self._running: set[str | None] = set()
        self._lock = threading.Lock()

    def __call__(self, batch: Batch[bytes]) -> None:
        given = [(message.key, message.value, message.attempt) for message in batch]
        keys = {message.key for message in batch} - {None}
        with self._lock:
            self.begun.append(given)
            self.overlaps += keys & self._running
            self._running |= keys
        try:
            self._act(batch)
        finally:
            with self._lock:
                self._running -= keys
        self.done.append(given)

    def bodies(self, key: str) -> list[bytes]:
        """Return what was begun of a key, in order."""
        return [body for given in self.begun for of, body, _ in given if of == key]

    def attempts(self, key: str, body: bytes) -> list[int]:
        """Return the attempt number of each time that a message was given, with the size of its batch."""
        return [attempt for given in self.begun for of, value, attempt in given if (of, value) == (key, body)]


def numbers(count: int, *, first: int = 1) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def held_by(go_on: threading.Event) -> Callable[[Batch[bytes]], None]:
    """Return an act that ends when the test says so."""

    def act(_batch: Batch[bytes]) -> None:
        go_on.wait(30)

    return act


def test_a_batch_has_one_message_of_each_key_and_keeps_their_order(stage: Stage) -> None:
    """Case 50: of each key one message is out, its next one comes in a later batch."""
    stage.send_numbers(keys=30, each=20)
    batches = Batches()
    stage.consume(batches, batch=DISTINCT, concurrency=3)
    stage.wait_settled()
    for given in batches.begun:
        assert len({key for key, _, _ in given}) == len(given) <= 50
    assert all(batches.bodies(f"key-{key}") == numbers(20) for key in range(30))
    assert batches.overlaps == []
    assert max(map(len, batches.begun)) > 10


def test_a_batch_of_a_key_has_its_messages_in_order(stage: Stage) -> None:
    """Case 50, with the batch as what is out of a key."""
    stage.send_numbers(keys=5, each=100)
    batches = Batches()
    stage.consume(batches, batch=OF_KEY, concurrency=3)
    stage.wait_settled()
    for given in batches.begun:
        assert len({key for key, _, _ in given}) == 1
        assert len(given) <= 20
    assert all(batches.bodies(f"key-{key}") == numbers(100) for key in range(5))
    assert batches.overlaps == []
    assert max(map(len, batches.begun)) > 10


def test_messages_that_are_marked_as_failed_come_again_alone_and_hold_up_nobody(stage: Stage) -> None:
    """Cases 58, 64: attempts count for the failed one only, what is behind it of its key waits, others go on."""

    def act(batch: Batch[bytes]) -> None:
        bad = [message for message in batch if message.key == "key-3" and message.value == b"2"]
        if bad and bad[0].attempt < 3:
            batch.fail(bad[0], RuntimeError("planted"))

    stage.send_numbers(keys=10, each=4)
    batches = Batches(act)
    app = stage.consume(batches, batch=DISTINCT)
    stage.wait_settled()
    assert batches.attempts("key-3", b"2") == [1, 2, 3]
    assert [len(given) for given in batches.begun if any(attempt > 1 for _, _, attempt in given)] == [1, 1]
    assert batches.bodies("key-3") == [b"1", b"2", b"2", b"2", b"3", b"4"]
    assert all(batches.bodies(f"key-{key}") == numbers(4) for key in range(10) if key != 3)
    # The member counts a moment after its node has settled.
    stats = member_of(app).stats
    wait_until(lambda: (stats.failed, stats.handled) == (2, 40), what="all counted, once")


def test_of_a_key_what_comes_before_the_failed_one_is_done_and_the_rest_follows_it(stage: Stage) -> None:
    """Cases 51, 58, 66: the prefix is settled, the failed one is tried again, then what is behind it, in order."""

    def act(batch: Batch[bytes]) -> None:
        for message in batch:
            if message.value == b"5" and message.attempt == 1:
                batch.fail(message, RuntimeError("planted"))

    stage.send([("k", body) for body in numbers(10)])
    batches = Batches(act)
    stage.consume(batches, batch=OF_KEY)
    stage.wait_settled()
    assert [[int(body) for _, body, _ in given] for given in batches.begun] == [
        [*range(1, 11)], [5], [6, 7, 8, 9, 10]
    ]  # fmt: skip
    assert batches.attempts("k", b"5") == [1, 2]
    assert batches.attempts("k", b"6") == [1, 1], "what only waited has no failed attempt"


@pytest.mark.parametrize("kind", some_of(["distinct", "key"], 2))
def test_none_beside_a_message_that_fails_for_ever_pays_for_it(stage: Stage, kind: Any) -> None:
    """Cases 59, 65: an exception blames nobody of several; one by one, only the bad message dies, at its first try."""

    def act(batch: Batch[bytes]) -> None:
        if any(message.value == b"7" for message in batch):
            raise RuntimeError("one of them, but which?")

    keys = [f"key-{number}" if kind == "distinct" else "k" for number in range(20)]
    stage.send(list(zip(keys, numbers(20), strict=True)))
    batches = Batches(act)
    stage.consume(batches, batch=BatchOf(kind), attempt_limit=1, policy="dead_letter", concurrency=1)
    stage.wait_settled()
    assert Failing(stage).dead() == [b"7"]
    handled = [body for given in batches.done for _, body, _ in given]
    assert sorted(handled, key=int) == [body for body in numbers(20) if body != b"7"]


def test_what_is_marked_as_done_stays_so_when_the_handler_raises(stage: Stage) -> None:
    def act(batch: Batch[bytes]) -> None:
        if len(batch) > 1:
            batch.done(*batch[:6])
            raise RuntimeError("the others")

    stage.send([("k", body) for body in numbers(10)])
    batches = Batches(act)
    stage.consume(batches, batch=OF_KEY)
    stage.wait_settled()
    assert [[int(body) for _, body, _ in given] for given in batches.begun] == [[*range(1, 11)], [7], [8], [9], [10]]
    assert batches.attempts("k", b"7") == [1, 1]


def test_of_a_key_nothing_is_done_before_what_precedes_it(stage: Stage) -> None:
    """Marking in another order is refused, and tells what to do."""
    refused: list[str] = []

    def act(batch: Batch[bytes]) -> None:
        if len(batch) > 1 and not refused:
            batch.fail(batch[2], RuntimeError("planted"))
            for index in (3, 1, 2):
                try:
                    batch.done(batch[index])
                except InvalidInput as error:
                    refused.append(str(error))
            batch.done(batch[0], batch[1])

    stage.send([("k", body) for body in numbers(5)])
    batches = Batches(act)
    stage.consume(batches, batch=OF_KEY)
    stage.wait_settled()
    assert [int(body) for body in batches.bodies("k")] == [1, 2, 3, 4, 5, 3, 4, 5]
    assert len(refused) == 3
    assert "message 0 of the batch comes before message 3" in refused[0]
    assert "go through them in order" in refused[0]
    assert "message 0 of the batch comes before message 1" in refused[1]
    assert "marked as failed" in refused[2]


@pytest.mark.parametrize("kind", ["distinct", "key"])
def test_a_message_may_be_rejected_put_off_or_paused_by_itself(stage: Stage, kind: Any) -> None:
    """Cases 65, 66: what single handlers raise is said of one message of a batch."""

    def act(batch: Batch[bytes]) -> None:
        for message in batch:
            error: Exception | None = None
            if message.value == b"1":
                error = Reject("no such order")
            elif message.value == b"2" and message.attempt == 1:
                error = RetryLater(0.01)
            elif message.value == b"3" and not paused:
                error = PauseKey(0.01)
                paused.append(True)
            if error is not None:
                batch.fail(message, error)
                if kind == "key":
                    return

    paused: list[bool] = []
    stage.send([("a" if kind == "key" else body.decode(), body) for body in numbers(4)])
    batches = Batches(act)
    app = stage.consume(batches, batch=BatchOf(kind), policy="dead_letter")
    stage.wait_settled()
    stats = member_of(app).stats
    wait_until(
        lambda: (stats.dead, stats.paused, stats.failed, stats.handled) == (1, 1, 2, 3), what="all counted, once"
    )


@pytest.mark.parametrize("kind", ["distinct", "key"])
def test_a_parked_key_is_handled_in_batches_when_it_is_released(stage: Stage, kind: Any) -> None:
    """Case 65: what waits in Postgres comes in order, one by one where its batch fails as a whole."""
    broken = True

    def act(batch: Batch[bytes]) -> None:
        for message in batch:
            if message.key == "bad" and message.value == b"1" and broken:
                batch.fail(message, RuntimeError("planted"))
        if not broken and len(batch) > 1 and batch[0].key == "bad" and batch[-1].value == b"12":
            raise RuntimeError("as a whole")

    batches = Batches(act)
    stage.consume(batches, batch=BatchOf(kind, limit=20), attempt_limit=1, policy="park")
    stage.send([*(("bad", body) for body in numbers(12)), *(("good", body) for body in numbers(3))])
    stage.wait_settled()
    assert batches.bodies("good") == numbers(3)
    broken = False
    release_parked(runtime_of(stage.database, actor="a test"), "orders", "g", key="bad")
    wait_until(lambda: Failing(stage).parked() == [], timeout_s=20, what="the parked key is handled")
    handled = [body for given in batches.done for key, body, _ in given if key == "bad"]
    assert list(dict.fromkeys(handled)) == numbers(12)
    assert len(handled) < 25, "each once, but for the batches that the failed one was in"
    assert {attempt for given in batches.begun[2:] for _, _, attempt in given} == {1}
    if kind == "key":
        assert [len(given) for given in batches.begun if given[0][0] == "bad"][-13:] == [12, *([1] * 12)]


def test_a_batch_waits_for_others_as_long_as_it_is_told(stage: Stage) -> None:
    batches = Batches()
    stage.consume(batches, batch=BatchOf("distinct", limit=4, linger_s=30.0))
    for number in range(4):
        assert batches.begun == []
        stage.send([(f"key-{number}", b"1")])
    stage.wait_settled()
    assert [len(given) for given in batches.begun] == [4]


def test_a_batch_does_not_wait_for_what_its_member_has_no_room_to_read(stage: Stage) -> None:
    """A partition's part of what is read ahead may be less than a batch: it gets no fuller by waiting."""
    batches = Batches()
    stage.consume(batches, batch=BatchOf("key", limit=40, linger_s=60.0), prefetch_count=40)
    key = stage.key_in(stage.partitions[0])
    stage.send((key, body) for body in numbers(100))
    wait_until(lambda: len(batches.bodies(key)) >= 60, what="several batches")
    assert batches.bodies(key) == numbers(len(batches.bodies(key)))


def test_a_key_that_is_paused_while_it_is_handled_out_of_postgres_rests_soon(stage: Stage) -> None:
    """Not after all that its member fetched of it: the batch that runs ends, and what begins within a turn."""
    go_on, failed = threading.Event(), threading.Event()

    def act(batch: Batch[bytes]) -> None:
        if not failed.is_set():
            failed.set()
            batch.fail(batch[0], RetryLater(11.0))
        else:
            assert go_on.wait(30)

    stage.send([("key", body) for body in numbers(50)])
    batches = Batches(act)
    stage.consume(batches, batch=DISTINCT)
    wait_until(lambda: len(Failing(stage).parked()) == 50, what="the key is parked")
    release_parked(runtime_of(stage.database, actor="test"), stage.topic, "g", key="key")
    wait_until(lambda: len(batches.begun) == 2, what="it goes on")
    began = time.monotonic()
    assert pause_key(runtime_of(stage.database, actor="test"), stage.topic, "g", "key")
    wait_until(lambda: time.monotonic() > began + 2 * TIME_SLICE_S, what="the turn is over")
    go_on.set()
    wait_until(lambda: len(Failing(stage).parked()) < 50, what="what was handled is written")
    assert (len(Failing(stage).parked()), len(batches.begun)) == (49, 2)


def test_what_waits_for_a_batch_is_not_begun_at_a_stop(stage: Stage) -> None:
    """Case 71: nor does the stop wait for it."""
    first, second = Batches(), Batches()
    app = stage.consume(first, batch=BatchOf("distinct", linger_s=60.0))
    stage.send([("k", b"1")])
    wait_until(lambda: _read(app), what="it is read")
    assert app.stop()
    stage.consume(second, batch=DISTINCT)
    stage.wait_settled()
    assert (first.begun, second.begun) == ([], [[("k", b"1", 1)]])


def _read(app: App) -> bool:
    return any(owned.room.count for owned in member_of(app).ownership.all())


def test_a_batch_of_a_key_goes_without_what_does_not_come_in_time(stage: Stage) -> None:
    batches = Batches()
    stage.consume(batches, batch=BatchOf("key", limit=3, linger_s=0.2))
    began = time.monotonic()
    stage.send([("full", body) for body in numbers(3)] + [("thin", b"1")])
    stage.wait_settled()
    assert time.monotonic() - began >= 0.2
    assert [len(given) for given in batches.begun] == [3, 1]


def test_a_batch_is_bounded_by_bytes_but_for_a_single_message(stage: Stage) -> None:
    stage.send([("k", b"x" * size) for size in (100, 100, 5_000, 100, 800, 100)])
    batches = Batches()
    stage.consume(batches, batch=BatchOf("key", limit_bytes=1_000))
    stage.wait_settled()
    assert [[len(body) for _, body, _ in given] for given in batches.begun] == [[100, 100], [5_000], [100, 800], [100]]


class Order(msgspec.Struct):
    """A body."""

    amount: int


@pytest.mark.parametrize("kind", ["distinct", "key"])
def test_bodies_come_decoded_and_one_that_does_not_fit_fails_by_itself(stage: Stage, kind: Any) -> None:
    """The handler never sees it, nor what is behind it of its key."""
    seen: list[list[int]] = []

    def handle(orders: list[Order], batch: Batch[Order]) -> None:
        assert [message.value for message in batch] == orders
        seen.append([order.amount for order in orders])

    bodies = [b'{"amount": 1}', b'{"amount": 2}', b'{"amount": "secret"}', b'{"amount": 4}']
    stage.send([("k" if kind == "key" else str(number), body) for number, body in enumerate(bodies)])
    stage.consume(handle, batch=BatchOf(kind), attempt_limit=1, policy="dead_letter")
    stage.wait_settled()
    assert sorted(amount for amounts in seen for amount in amounts) == [1, 2, 4]
    if kind == "key":
        assert seen == [[1, 2], [4]]
    assert Failing(stage).dead() == [bodies[2]]


@pytest.mark.parametrize("kind", some_of(["distinct", "key"], 2))
def test_async_handlers_take_batches(stage: Stage, kind: Any) -> None:
    seen: list[tuple[str, int]] = []

    async def handle(batch: Batch[int]) -> None:
        await asyncio.sleep(0)
        for message in batch:
            if message.value == 3 and message.attempt == 1:
                batch.fail(message, RuntimeError("planted"))
                if kind == "key":
                    return
            else:
                seen.append((str(message.key), message.value))

    stage.send_numbers(keys=4, each=10)
    stage.consume(handle, batch=BatchOf(kind, limit=8, linger_s=0.05))
    stage.wait_settled()
    assert all([value for of, value in seen if of == f"key-{key}"] == [*range(1, 11)] for key in range(4))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_batch_that_takes_too_long_is_ended_and_its_messages_come_one_by_one(stage: Stage, is_async: bool) -> None:
    """Case 70: the limit is of one call; whoever is slow by itself fails, the others don't."""
    seen: list[list[bytes]] = []

    def slow(batch: Batch[bytes]) -> bool:
        seen.append([message.value for message in batch])
        assert 0 < batch.remaining_s <= 1.0
        return b"2" in seen[-1]

    def plain(batch: Batch[bytes]) -> None:
        while slow(batch):
            until = time.monotonic() + 30
            while time.monotonic() < until:
                time.sleep(0.005)

    async def loop(batch: Batch[bytes]) -> None:
        if slow(batch):
            await asyncio.sleep(30)

    stage.send([(f"key-{number}", b"%d" % number) for number in range(4)] + [("key-1", b"11")])
    stage.consume(
        loop if is_async else plain, batch=BatchOf("distinct", limit=4, linger_s=1.0), body=bytes,
        time_limit_s=1.0, attempt_limit=1, policy="dead_letter",
    )  # fmt: skip
    stage.wait_settled()
    assert len(seen[0]) == 4
    assert Failing(stage).dead() == [b"2"]


def test_a_stop_waits_for_the_batch_and_nothing_of_it_comes_again(stage: Stage) -> None:
    """Cases 36, 71: what runs is settled before others go on; what was not begun has no attempt more."""
    go_on = threading.Event()
    first = Batches(held_by(go_on))
    stage.send_numbers(keys=3, each=5)
    app = stage.consume(first, batch=BatchOf("key", limit=2), concurrency=2)
    wait_until(lambda: len(first.begun) == 2, what="two batches run")
    stopper = threading.Thread(target=app.stop)
    stopper.start()
    wait_until(lambda: not app.running, what="it stops")
    second = Batches()
    stage.consume(second, batch=OF_KEY)
    go_on.set()
    stopper.join()
    stage.wait_settled()
    assert len(first.begun) == 2
    for key in range(3):
        assert first.bodies(f"key-{key}") + second.bodies(f"key-{key}") == numbers(5)
    assert {attempt for given in second.begun for _, _, attempt in given} == {1}


@pytest.mark.full
def test_after_the_drain_limit_the_batch_comes_again_elsewhere(stage: Stage) -> None:
    """Case 37: a batch that does not end in time is given to the next owner, and its own acks are refused."""
    go_on = threading.Event()
    first, second = Batches(held_by(go_on)), Batches()
    stage.send_numbers(keys=1, each=4)
    app = stage.consume(first, batch=BatchOf("key", limit=2))
    wait_until(lambda: first.begun, what="a batch runs")
    assert not app.stop(timeout_s=0.1)
    stage.consume(second, batch=OF_KEY)
    stage.wait_settled()
    go_on.set()
    assert first.bodies("key-0") == numbers(2)
    assert second.bodies("key-0") == numbers(4)


def test_what_can_not_be_a_batch_is_refused(stage: Stage) -> None:
    app = stage.app()
    for wrong in (
        lambda: BatchOf("keys"),  # type: ignore[arg-type]
        lambda: BatchOf("key", limit=501),
        lambda: BatchOf("key", limit_bytes=0),
        lambda: BatchOf("key", linger_s=-1),
        lambda: app.consumer("orders", group="g", batch=OF_KEY, ordered=False),
        lambda: app.consumer("orders", group="g", batch=BatchOf("key", limit_bytes=1 << 40)),
        lambda: app.consumer("orders", group="g", batch=OF_KEY)(lambda one, two, three: None),
    ):
        with pytest.raises(InvalidInput):
            wrong()

    def single(order: Order) -> None:
        pass

    def both(batch: Batch[Order], again: Batch[Order]) -> None:
        pass

    for handler in (single, both):
        with pytest.raises(InvalidInput):
            app.consumer("orders", group="g", batch=OF_KEY)(handler)
    stage.consume(lambda body: None, ordered=False)
    with pytest.raises(Conflict, match="keeps no order"):
        stage.consume(Batches(), batch=OF_KEY)


def test_a_group_without_order_has_batches_of_whatever_comes(stage: Stage) -> None:
    """Each message stands alone there, so a key may be in a batch more than once."""
    stage.send([("k", body) for body in numbers(40)])
    batches = Batches()
    stage.consume(batches, batch=DISTINCT, ordered=False)
    stage.wait_settled()
    assert sorted(batches.bodies("k"), key=int) == numbers(40)
    assert len(batches.begun) < 40
