"""How long a handler has for a message: it is ended when that is over, and never after it returned."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mqlayer import Context
from mqlayer.consuming.engine import timeouts as limits_module
from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.timeouts import HandlerInterrupt, ThreadTimeouts
from mqlayer.domain.message import Record
from mqlayer.domain.retry_rules import RetryRules
from mqlayer.errors import InvalidInput, MessageTimeout
from mqlayer.groups.admin import set_group
from mqlayer.logs import event_of
from tests.fixtures.consumers import Recorder, Stage, StartStage, member_of
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

LIMIT_S = 2.0
LEASE_S = 10.0
"""Longer than handlers take: a lease that ran out meanwhile would give their messages to somebody else."""
HELD: Any = None
RECORD = Record(1, b"", b"k", b"")


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what members logged of failed attempts: the errors' types and places."""
    return [str(vars(record)["error"]) for record in caplog.records if event_of(record) == "handler_failed"]


def work_for(seconds: float) -> None:
    """Keep the thread busy, in Python code."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def _log_failures(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


# -- plain handlers ----------------------------------------------------------------------------------------------------


def test_a_plain_handler_is_ended_when_its_time_is_up_and_its_message_is_tried_again(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """Other keys go on, the key's next message waits; `except Exception` of the handler does not catch it."""
    ended_after: list[float] = []

    def act(body: bytes, ctx: Context) -> None:
        if (body, ctx.attempt) != (b"1", 1) or ctx.key != "slow":
            return
        began = clock()
        assert 0 < ctx.remaining_s <= LIMIT_S
        try:
            work_for(30)
        except Exception:  # noqa: BLE001 - what a handler does that knows no better
            pytest.fail("caught")
        finally:
            ended_after.append(clock() - began)

    recorder = Recorder(act)
    stage.send([("slow", b"1"), ("slow", b"2"), ("other", b"1")])
    stage.consume(recorder, settings=stage.settings(lease_s=LEASE_S), time_limit_s=LIMIT_S)
    stage.wait_settled()
    recorder.assert_in_order()
    assert recorder.attempts(b"1") in ([1, 1, 2], [1, 2, 1])
    assert recorder.bodies("slow") == [b"1", b"2"]
    assert LIMIT_S / 2 <= ended_after[0] < LIMIT_S + 5
    (said,) = failures(caplog)
    assert said.startswith(f"the handler had {LIMIT_S:g} s for the message")
    assert f"{__file__}:" in said, "the place in the handler"


def test_a_handler_that_ends_in_time_knows_nothing_of_the_limit(stage: Stage) -> None:
    recorder = Recorder(lambda _, ctx: work_for(0.01 if ctx.key == "key-0" else 0))
    stage.send_numbers(4, 25)
    app = stage.consume(recorder, time_limit_s=60.0)
    stage.wait_settled()
    recorder.assert_in_order()
    assert all(handled.attempt == 1 for handled in recorder.begun)
    assert member_of(app).stats.failed == 0


def test_without_a_limit_no_watcher_runs_and_there_is_nothing_to_extend(stage: Stage) -> None:
    seen: list[tuple[float, float]] = []
    stage.send([("k", b"1")])
    stage.consume(Recorder(lambda _, ctx: seen.append((ctx.remaining_s, ctx.extend(5)))))
    stage.wait_settled()
    assert seen == [(math.inf, math.inf)]
    assert not [thread.name for thread in threading.enumerate() if thread.name.endswith("-limits")]


def test_a_limit_that_is_set_changed_or_taken_away_reaches_a_running_member(stage: Stage) -> None:
    """Each handler works by the limit that was in force when it began."""
    left: list[float] = []
    recorder = Recorder(lambda _, ctx: left.append(ctx.remaining_s))
    member = member_of(stage.consume(recorder))
    expected: list[float | None] = [None, 50.0, 5.0, None]
    for number, limit_s in enumerate(expected):
        if number:
            said = math.inf if limit_s is None else limit_s
            set_group(runtime_of(stage.database, actor="a test"), "orders", "g", time_limit_s=said)
        wait_until(lambda: member.settings.rules.time_limit_s == limit_s, what="the member to know")  # noqa: B023
        stage.send([("k", b"%d" % number)])
        wait_until(lambda: len(left) == number + 1, what="the message")  # noqa: B023
    assert left[0] == left[3] == math.inf
    assert 5 < left[1] <= 50
    assert left[2] <= 5
    set_group(runtime_of(stage.database, actor="a test"), "orders", "g", time_limit_s=1.0)
    wait_until(lambda: member.settings.rules.time_limit_s == 1.0, what="the member to know")
    recorder.act = lambda _, ctx: work_for(30) if ctx.attempt == 1 else None
    stage.send([("k", b"9")])
    stage.wait_settled()
    assert recorder.attempts(b"9") == [1, 2]


# -- extend, and the cap -----------------------------------------------------------------------------------------------


def test_a_handler_that_extends_its_time_may_go_on_up_to_the_cap(stage: Stage) -> None:
    answers: list[float] = []

    def act(_body: bytes, ctx: Context) -> None:
        for _ in range(10):
            work_for(0.3)
            answers.append(ctx.extend(LIMIT_S))
            answers.append(ctx.extend())
        assert ctx.extend(1000) <= 60
        assert ctx.extend(0) > 50, "it is never made shorter"
        with pytest.raises(InvalidInput):
            ctx.extend(-1)

    recorder = Recorder(act)
    stage.send([("k", b"1")])
    settings = stage.settings(lease_s=LEASE_S)
    stage.consume(recorder, settings=settings, time_limit_s=LIMIT_S, max_time_limit_s=60.0)
    stage.wait_settled()
    assert recorder.attempts(b"1") == [1]
    assert all(LIMIT_S / 2 < answer <= LIMIT_S for answer in answers)


@pytest.mark.parametrize("kind", some_of(["plain", "async"], 9))
def test_a_handler_of_many_leases_is_left_alone_up_to_the_cap_and_its_message_comes_again_then(
    start_stage: StartStage, redis_url: str, kind: str
) -> None:
    """Case 70: heartbeats keep the message from another delivery, extensions go no further than the cap."""
    stage = start_stage(redis_url, partitions=2)
    lease_s, cap_s = 3.0, 7.5
    begun: list[tuple[float, int]] = []
    ended: list[float] = []

    def plain(body: bytes, ctx: Context) -> None:
        begun.append((clock(), ctx.attempt))
        try:
            while ctx.attempt == 1:
                ctx.extend(60)
                time.sleep(0.01)
        finally:
            ended.append(clock())

    async def coroutine(body: bytes, ctx: Context) -> None:
        begun.append((clock(), ctx.attempt))
        try:
            while ctx.attempt == 1:
                ctx.extend(60)
                await asyncio.sleep(0.01)
        finally:
            ended.append(clock())

    handler: Callable[..., object] = plain if kind == "plain" else coroutine
    for _ in range(2):
        stage.consume(handler, settings=stage.settings(lease_s=lease_s), time_limit_s=LIMIT_S, max_time_limit_s=cap_s)
    stage.send([("k", b"1")])
    stage.wait_settled()
    assert [attempt for _, attempt in begun] == [1, 2]
    assert cap_s - 1 <= ended[0] - begun[0][0] < cap_s + 5
    assert begun[1][0] >= ended[0]


@pytest.mark.full
def test_a_limit_without_a_cap_can_not_be_extended_and_a_cap_alone_is_the_limit(stage: Stage) -> None:
    left: list[float] = []
    recorder = Recorder(lambda _, ctx: left.append(ctx.extend(60)))
    member = member_of(stage.consume(recorder, time_limit_s=5.0))
    stage.send([("k", b"1")])
    wait_until(lambda: len(left) == 1, what="the message")
    set_group(runtime_of(stage.database, actor="a test"), "orders", "g", time_limit_s=math.inf, max_time_limit_s=7.0)
    wait_until(lambda: member.settings.rules.max_time_limit_s == 7.0, what="the member to know")
    stage.send([("k", b"2")])
    wait_until(lambda: len(left) == 2, what="the message")
    assert 0 < left[0] <= 5 < left[1] <= 7


# -- async handlers ----------------------------------------------------------------------------------------------------


def test_an_async_handler_is_cancelled_when_its_time_is_up(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    async def handle(body: bytes, ctx: Context) -> None:
        if ctx.attempt == 2:
            seen.append(f"{body.decode()} again")
            return
        if body == b"own":
            # Of the handler's own making: no matter of the group's limit.
            raise TimeoutError
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            seen.append(f"{body.decode()} cancelled")
            raise

    stage.send([("k", b"1"), ("l", b"own")])
    stage.consume(handle, settings=stage.settings(lease_s=LEASE_S), time_limit_s=LIMIT_S)
    stage.wait_settled()
    assert sorted(seen) == ["1 again", "1 cancelled", "own again"]
    said = sorted(failures(caplog))
    assert [text.split(" ")[0] for text in said] == ["TimeoutError", "the"]
    assert __file__ in said[0]


def test_an_async_handler_extends_its_time_from_any_thread(stage: Stage) -> None:
    attempts: list[int] = []

    async def handle(body: bytes, ctx: Context) -> None:
        attempts.append(ctx.attempt)
        for _ in range(6):
            await asyncio.sleep(0.5)
            if body == b"here":
                ctx.extend(LIMIT_S)
            else:
                await asyncio.to_thread(ctx.extend, LIMIT_S)

    stage.send([("k", b"here"), ("l", b"there")])
    settings = stage.settings(lease_s=LEASE_S)
    stage.consume(handle, settings=settings, time_limit_s=LIMIT_S, max_time_limit_s=30.0)
    stage.wait_settled()
    assert attempts == [1, 1]


# -- never after the handler -------------------------------------------------------------------------------------------


def nap(seconds: float) -> None:
    """Let time pass in small steps, each of which can be interrupted."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.0001)


def run_near_the_limit(limits: ThreadTimeouts, count: int, outcomes: list[str], stray: list[BaseException]) -> None:
    """Run handlers that end near their limit of 2 ms, as a worker would."""
    rules = RetryRules(time_limit_s=0.002)

    def handle(_held: object, _record: Record) -> str:
        nap(random.uniform(0.001, 0.003))
        return "in time"

    try:
        for _ in range(count):
            try:
                outcomes.append(limits.wrap(handle, rules)(HELD, RECORD))
            except MessageTimeout:
                outcomes.append("timeout")
            # What a worker does between two messages: places where it could be hit.
            nap(0.0012)
    except BaseException as error:  # noqa: BLE001 - this is what must not be
        stray.append(error)


@pytest.mark.full
@pytest.mark.parametrize("slow", some_of([False, True], 9))
def test_a_limit_never_hits_after_the_handler_however_near_they_end(
    monkeypatch: pytest.MonkeyPatch, *, slow: bool
) -> None:
    """2,000 handlers that end within a millisecond of their limit: what runs between them is never interrupted.

    Also where the watcher has decided, and is slow to do it.
    """

    def raise_slowly(thread: int, kind: Any) -> int:
        if threading.get_ident() != thread:
            time.sleep(random.uniform(0, 0.001))
        return int(raise_in_thread(thread, kind))

    raise_in_thread = limits_module._raise_in_thread
    if slow:
        monkeypatch.setattr(limits_module, "_raise_in_thread", raise_slowly)
    limits = ThreadTimeouts("a-test")
    outcomes: list[str] = []
    stray: list[BaseException] = []
    threads = [threading.Thread(target=run_near_the_limit, args=(limits, 500, outcomes, stray)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert stray == []
    assert len(outcomes) == 2_000
    assert min(outcomes.count("in time"), outcomes.count("timeout")) > 100, "both ends were met"
    assert limits.alive
    limits.stop()
    wait_until(lambda: not any(t.name == "a-test-timeouts" for t in threading.enumerate()), what="the watcher to end")


@pytest.mark.full
def test_an_error_of_the_handler_at_its_limit_is_never_lost_nor_taken_for_another_messages() -> None:
    """The interruption may come while the handler's own error is under way: one of both is reported, at once."""
    limits, rules = ThreadTimeouts("a-test"), RetryRules(time_limit_s=0.001)
    seen: set[str] = set()

    def handle(_held: object, _record: Record) -> None:
        try:
            time.sleep(random.uniform(0.0005, 0.0015))
            raise KeyError
        finally:
            str(seen)

    for _ in range(1_000):
        try:
            limits.wrap(handle, rules)(HELD, RECORD)
        except (KeyError, MessageTimeout) as error:
            seen.add(type(error).__name__)
        except HandlerInterrupt:
            pytest.fail("it left the guard")
    assert seen == {"KeyError", "MessageTimeout"}
    limits.stop()


@pytest.mark.full
def test_members_settle_thousands_of_messages_whose_handlers_end_near_their_limit(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    ended: dict[str | None, list[bytes]] = {}

    def handle(body: bytes, ctx: Context) -> None:
        if ctx.attempt == 1:
            time.sleep(random.choice((0, 0, 0.0018, 0.0022)))
        of_key = ended.setdefault(ctx.key, [])
        # It may be hit behind this line too, and comes again then.
        if body not in of_key[-1:]:
            of_key.append(body)

    stage.send_numbers(60, 50)
    app = stage.consume(handle, time_limit_s=0.002, backoff_s=(0.0,), attempt_limit=1_000)
    stage.wait_settled(timeout_s=40)
    assert ended == {f"key-{key}": [b"%d" % number for number in range(1, 51)] for key in range(60)}
    assert member_of(app).health().live
    assert {text.split(" s for ")[0] for text in failures(caplog)} == {"the handler had 0.002"}
    assert not [record for record in caplog.records if event_of(record) == "failure_decision_failed"]
    assert app.stop()
    wait_until(lambda: not any(t.name.endswith("-limits") for t in threading.enumerate()), what="the watcher to end")
