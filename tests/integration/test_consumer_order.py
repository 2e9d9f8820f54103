"""Order and concurrency of one member: one key strictly in order, different keys side by side."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from mqlayer import Context
from mqlayer.consuming.engine.clock import clock
from mqlayer.redis.partition_scripts import failures_of
from tests.fixtures.consumers import Recorder, Stage, member_of
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until


class Fault(Exception):
    """What handlers of these tests raise."""


def wait_for(what: threading.Event | threading.Barrier) -> Callable[[bytes, Context], None]:
    """Return what a handler does that waits, and gives up long after the test has."""

    def act(_body: bytes, _ctx: Context) -> None:
        what.wait(30)

    return act


def test_each_key_is_handled_in_order_and_never_twice_at_a_time(every_stage: Stage) -> None:
    recorder = Recorder()
    every_stage.send_numbers(keys=20, each=100)
    every_stage.consume(recorder)
    every_stage.send_numbers(keys=20, each=50, first=101)
    every_stage.wait_settled()
    recorder.assert_in_order()
    assert recorder.bodies("key-7") == [str(number).encode() for number in range(1, 151)]


def test_different_keys_run_side_by_side_up_to_the_concurrency(stage: Stage) -> None:
    together = threading.Barrier(4)
    stage.send((f"key-{number}", b"1") for number in range(8))
    recorder = Recorder(wait_for(together))
    stage.consume(recorder, concurrency=4)
    stage.wait_settled()
    assert recorder.count() == 8


def test_messages_without_a_key_wait_for_nobody(stage: Stage) -> None:
    together = threading.Barrier(4)
    stage.send([(None, b"%d" % number) for number in range(8)])
    recorder = Recorder(wait_for(together))
    stage.consume(recorder, concurrency=4)
    stage.wait_settled()
    assert {handled.key for handled in recorder.ended} == {None}
    assert recorder.count() == 8


@pytest.mark.full
def test_many_messages_without_a_key_use_no_bounds_up(stage: Stage) -> None:
    recorder = Recorder()
    app = stage.consume(recorder, prefetch_bytes=40_000)
    for _ in range(3):
        stage.send([(None, b"x" * 20) for _ in range(4_000)])
        stage.wait_settled()
    held = member_of(app).ownership.all()
    assert len(held) == 2
    wait_until(lambda: all((h.room.count, h.room.bytes) == (0, 0) for h in held), timeout_s=20, what="room given back")


def test_while_a_key_fails_and_waits_other_keys_go_on(every_stage: Stage) -> None:
    may_pass = threading.Event()

    def act(body: bytes, ctx: Context) -> None:
        if ctx.key == "bad" and body == b"2" and not may_pass.is_set():
            raise Fault

    recorder = Recorder(act)
    every_stage.send([("bad", b"1"), ("bad", b"2"), ("bad", b"3")])
    every_stage.send_numbers(keys=10, each=50)
    every_stage.consume(recorder)
    wait_until(lambda: recorder.count() == 501, timeout_s=20, what="all but two handled")
    wait_until(lambda: len(recorder.attempts(b"2")) > 13, timeout_s=20, what="retries of the bad one")
    assert recorder.bodies("bad") == [b"1"]
    may_pass.set()
    every_stage.wait_settled()
    recorder.assert_in_order()
    assert recorder.bodies("bad") == [b"1", b"2", b"3"]


def test_a_failing_key_with_a_long_backlog_takes_no_room_from_others(every_stage: Stage) -> None:
    """Case 64 as far as it goes without parking: the backlog leaves the hand, and is read again in order."""
    may_pass = threading.Event()

    def act(body: bytes, ctx: Context) -> None:
        if ctx.key == "bad" and not may_pass.is_set():
            raise Fault

    recorder = Recorder(act)
    every_stage.send(("bad", b"%d" % number) for number in range(1, 801))
    every_stage.send_numbers(keys=10, each=20)
    app = every_stage.consume(recorder, prefetch_count=100, prefetch_bytes=200_000)
    wait_until(lambda: recorder.count() == 200, timeout_s=20, what="all other keys handled")
    # A handled message stays in hand until its settlement.
    wait_until(lambda: sum(owned.room.count for owned in member_of(app).ownership.all()) < 100, what="room for others")
    every_stage.send_numbers(keys=10, each=5, first=21)
    wait_until(lambda: recorder.count() == 250, timeout_s=20, what="later messages of other keys handled")
    may_pass.set()
    every_stage.wait_settled()
    recorder.assert_in_order()
    assert len(recorder.bodies("bad")) == 800
    wait_until(
        lambda: all((h.room.count, h.room.bytes, h.room.spilled) == (0, 0, 0) for h in member_of(app).ownership.all()),
        what="nothing in hand",
    )


def test_attempts_are_numbered_and_survive_a_hand_over(every_stage: Stage) -> None:
    def act(body: bytes, ctx: Context) -> None:
        if body == b"bad" and ctx.attempt < 6:
            raise Fault

    first, second = Recorder(act), Recorder(act)
    every_stage.send([("k", b"bad"), ("k", b"good")])
    app = every_stage.consume(first, backoff_s=(0.01, 0.01, 0.01, 9.0, 0.01))
    wait_until(lambda: len(first.attempts(b"bad")) == 4, timeout_s=20, what="four attempts")
    assert app.stop()
    [partition] = {handled.partition for handled in first.begun}
    noted = every_stage.redis.hgetall(every_stage.group_keys(partition).attempts)
    assert {key: failures_of(value).attempts for key, value in noted.items() if isinstance(value, bytes)} == {b"1": 4}
    every_stage.consume(second, backoff_s=None)
    every_stage.wait_settled()
    assert first.attempts(b"bad") == [1, 2, 3, 4]
    assert second.attempts(b"bad") == [5, 6]
    assert second.attempts(b"good") == [1]
    assert not every_stage.redis.exists(every_stage.group_keys(partition).attempts)


def test_a_failing_message_waits_by_the_table_within_a_tenth_and_keeps_what_follows_of_its_key(stage: Stage) -> None:
    """Case 66: the last entry serves for all further attempts. On a busy machine it takes some keys to see it."""
    begun: dict[str | None, list[float]] = {}
    followed: dict[str | None, int] = {}

    def handle(body: bytes, ctx: Context) -> None:
        if body == b"2":
            followed[ctx.key] = len(begun[ctx.key])
            return
        begun.setdefault(ctx.key, []).append(clock())
        if ctx.attempt < 4:
            raise Fault

    expected, quickest = (0.3, 0.6, 0.6), [math.inf] * 3

    stage.consume(handle, backoff_s=(0.3, 0.6))
    for turn in range(10):
        keys = [f"k-{turn}-{number}" for number in range(6)]
        stage.send((key, body) for body in (b"1", b"2") for key in keys)
        stage.wait_settled()
        for key in keys:
            assert followed[key] == 4
            waits = [later - earlier for earlier, later in pairwise(begun[key])]
            assert all(wait >= 0.999 * least for wait, least in zip(waits, expected, strict=True))
            quickest[:] = map(min, quickest, waits)
        if all(wait <= 1.1 * least for wait, least in zip(quickest, expected, strict=True)):
            return
    pytest.fail(f"later than a tenth, ten times: {quickest}")


def test_a_slow_key_does_not_keep_its_worker_from_other_keys(stage: Stage) -> None:
    """More keys than workers: one with a long line of slow messages goes to the end of the line now and then."""
    slow = threading.Event()

    def act(_body: bytes, ctx: Context) -> None:
        if ctx.key == "slow":
            slow.wait(0.02)

    recorder = Recorder(act)
    stage.send(("slow", b"%d" % number) for number in range(1, 401))
    stage.send([("other", b"1")])
    stage.consume(recorder, concurrency=1)
    wait_until(lambda: recorder.bodies("other"), timeout_s=20, what="the other key handled")
    assert [handled.key for handled in list(recorder.ended)].index("other") < 100
    slow.set()
    stage.wait_settled()
    recorder.assert_in_order()


def test_queues_beside_a_hanging_message_are_taken_over(stage: Stage) -> None:
    """Also where quick handlers had made workers take many key queues at a time."""
    go_on = threading.Event()

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"hang":
            go_on.wait(30)

    recorder = Recorder(act)
    stage.send_numbers(keys=50, each=40)
    stage.consume(recorder, concurrency=3)
    stage.wait_settled()
    stage.send([("hang-1", b"hang"), *((f"key-{number}", b"1000") for number in range(50)), ("hang-2", b"hang")])
    wait_until(lambda: recorder.count() == 2_050, timeout_s=10, what="all but the hanging ones")
    go_on.set()
    stage.wait_settled()


def test_async_handlers_run_side_by_side_on_one_loop_and_each_key_in_order(every_stage: Stage) -> None:
    running: Counter[str] = Counter()
    most: list[int] = []
    handled: dict[str, list[int]] = {}
    threads: set[int] = set()

    async def handle(body: bytes, ctx: Context) -> None:
        key = ctx.key or ""
        running[key] += 1
        assert running[key] == 1
        most.append(sum(running.values()))
        threads.add(threading.get_ident())
        await asyncio.sleep(0.001)
        running[key] -= 1
        if int(body) % 25 == 0 and ctx.attempt == 1:
            raise Fault
        handled.setdefault(key, []).append(int(body))

    every_stage.send_numbers(keys=16, each=50)
    every_stage.consume(handle, concurrency=8)
    every_stage.wait_settled()
    assert max(most) == 8
    assert len(threads) == 1
    assert handled == {f"key-{number}": list(range(1, 51)) for number in range(16)}


def test_an_async_handler_that_is_cancelled_from_within_has_failed_and_the_member_lives(stage: Stage) -> None:
    handled: list[bytes] = []

    async def handle(body: bytes, ctx: Context) -> None:
        if ctx.attempt == 1:
            raise asyncio.CancelledError
        handled.append(body)

    stage.send_numbers(keys=10, each=1)
    stage.consume(handle, concurrency=2)
    stage.wait_settled()
    assert len(handled) == 10


@pytest.mark.parametrize("error", some_of([SystemExit(3), KeyboardInterrupt(), GeneratorExit()], 9), ids=repr)
def test_whatever_a_handler_raises_is_its_failure_and_the_member_lives(stage: Stage, error: BaseException) -> None:
    def act(body: bytes, ctx: Context) -> None:
        if ctx.attempt == 1:
            raise error

    recorder = Recorder(act)
    stage.send_numbers(keys=10, each=2)
    stage.consume(recorder, concurrency=2)
    stage.wait_settled()
    assert recorder.count() == 20


def test_a_plain_handler_that_answers_a_coroutine_fails_loudly(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody would await it: the message would count as handled, and nothing would have been done."""
    may_pass = threading.Event()

    async def work() -> None: ...

    def handle(body: bytes) -> object:
        return None if may_pass.is_set() else work()

    stage.send([("k", b"1")])
    with caplog.at_level(logging.WARNING):
        stage.consume(handle)
        wait_until(lambda: "handler_failed" in caplog.text, what="the failure in the log")
    assert not stage.all_settled()
    may_pass.set()
    stage.wait_settled()


def test_an_object_with_an_async_call_is_an_async_handler(stage: Stage) -> None:
    class Handler:
        handled = 0

        async def __call__(self, body: str) -> None:
            await asyncio.sleep(0)
            self.handled += len(body)

    handler = Handler()
    stage.send([("k", b"12345")])
    stage.consume(handler)
    stage.wait_settled()
    assert handler.handled == 5


def test_what_is_read_ahead_is_bounded_by_count(stage: Stage) -> None:
    go_on = threading.Event()
    stage.send(("k", b"%d" % number) for number in range(1, 3_001))
    app = stage.consume(Recorder(wait_for(go_on)), prefetch_count=200)
    member = member_of(app)
    wait_until(lambda: max((h.room.count for h in member.ownership.all()), default=0) >= 90, what="read ahead")
    # A quarter of the share is the least that is read at a time: one pass more would show.
    wait_until(lambda: member._heartbeat.lease.until, what="a heartbeat")
    assert max(h.room.count for h in member.ownership.all()) <= 100
    go_on.set()
    stage.wait_settled()


def test_what_is_read_ahead_is_bounded_by_bytes(stage: Stage) -> None:
    go_on = threading.Event()
    stage.send((f"k{number}", b"x" * 50_000) for number in range(100))
    app = stage.consume(Recorder(wait_for(go_on)), prefetch_bytes=1_000_000)
    held = member_of(app).ownership
    wait_until(lambda: any(h.room.bytes > 300_000 for h in held.all()), what="read ahead")
    go_on.set()
    stage.wait_settled()
    # The first read knows no sizes: it may go over by what it believed.
    assert all(h.room.record_bytes > 20_000 for h in held.all() if h.next_read > 1)


def test_one_message_larger_than_the_bound_is_still_read(stage: Stage) -> None:
    recorder = Recorder()
    stage.send((f"k{number}", b"%d" % number * 50_000) for number in range(10))
    stage.consume(recorder, prefetch_bytes=10_000)
    stage.wait_settled()
    assert recorder.count() == 10
