"""Run handlers: on threads, or as coroutines on one event loop thread."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, Final, Protocol

from mqlayer.consuming.clock import clock
from mqlayer.consuming.dispatch import Dispatcher
from mqlayer.consuming.faults import where
from mqlayer.consuming.holdings import Held, Lane, State, parking_by
from mqlayer.consuming.limits import LoopLimits
from mqlayer.consuming.loops import HandlerThreads, LoopThread
from mqlayer.consuming.verdicts import Park, Verdict, Wait
from mqlayer.domain.message import Record
from mqlayer.domain.retrying import RetryRules
from mqlayer.errors import AlreadyApplied, HandlerFault, StaleOwner
from mqlayer.failpoints import failpoint
from mqlayer.parking import Burial

log = logging.getLogger(__name__)

IDLE_WAIT_S: Final = 0.25
"""How soon an idle worker looks by itself whether there is something to do."""
TURN_S: Final = 0.1
"""How long one key may keep its worker while others wait: it goes to the end of the line then."""
AGAIN_S: Final = 1.0


class Owner(Protocol):
    """What workers ask of the member they work for."""

    dispatcher: Dispatcher
    rules: RetryRules

    def handled(self, count: int) -> None:
        """Count what was handled, and let it be sent."""

    def failed(self, lane: Lane, record: Record, error: BaseException) -> Verdict:
        """Note that a message failed; return what becomes of it."""

    def begin(self, lane: Lane, record: Record) -> bool:
        """Note that a message is started which may have killed former owners; False where its holding is gone."""

    def end(self, lane: Lane, record: Record) -> None:
        """Note that it ended, in whatever way."""

    def fenced(self, held: Held, reason: str) -> None:
        """Drop a holding that a later owner has."""


class ThreadWorkers(HandlerThreads):
    """Threads that run plain handlers."""

    def __init__(self, owner: Owner, handle: Callable[..., Any], *, count: int, name: str) -> None:
        super().__init__(count=count, name=name)
        self._owner, self._handle = owner, handle

    def _work(self) -> None:
        dispatcher = self._owner.dispatcher
        hand = dispatcher.new_hand()
        while not dispatcher.stopping:
            if not dispatcher.take(hand, IDLE_WAIT_S):
                continue
            began = now = clock()
            messages = 0
            while True:
                try:
                    lane = hand.popleft()
                except IndexError:
                    break
                done, now = self._run(lane, now)
                messages += done
            self._owner.handled(messages)
            dispatcher.note_pace(messages, now - began)

    def _run(self, lane: Lane, now: float) -> tuple[int, float]:
        """Handle what a lane has, for one turn at most; return how many messages that were, and the time then."""
        lease, held, batch = self._owner.dispatcher.lease, lane.held, lane.batch
        handle = self._limits.around(self._handle, self._owner.rules)
        settled, until, done, caution = lane.line.append, now + TURN_S, 0, lane.caution
        try:
            for record in batch:
                if now >= until or held.state is not State.OPEN or now >= lease.until:
                    break
                if record.offset < caution:
                    if not self._handle_with_care(handle, lane, record):
                        break
                    answer = None
                else:
                    answer = handle(held, record)
                if answer is not None and isawaitable(answer):
                    raise not_awaited(answer)
                failpoint("handler.after_success")
                settled(record)
                done += 1
                now = clock()
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
            return judge(self._owner, lane, done, error), clock()
        give_back(self._owner, lane, done)
        return done, now

    def _handle_with_care(self, handle: Callable[[Held, Record], Any], lane: Lane, record: Record) -> bool:
        """Handle a message that may have killed former owners; False where its holding is gone."""
        if not self._owner.begin(lane, record):
            return False
        try:
            answer = handle(lane.held, record)
            if answer is not None and isawaitable(answer):
                raise not_awaited(answer)
        finally:
            self._owner.end(lane, record)
        return True


class LoopWorkers(LoopThread):
    """Coroutines that run async handlers."""

    def __init__(self, owner: Owner, handle: Callable[..., Awaitable[Any]], *, count: int, name: str) -> None:
        super().__init__(count=count, name=name)
        self._owner, self._handle = owner, handle
        self._limits = LoopLimits()
        owner.dispatcher.on_ready = self.poke

    async def _work(self, ready: asyncio.Event) -> None:
        dispatcher = self._owner.dispatcher
        hand: deque[Lane] = dispatcher.new_hand()
        while not dispatcher.stopping:
            if not dispatcher.take_now(hand):
                await self.rest(ready, IDLE_WAIT_S)
                continue
            while hand:
                self._owner.handled(await self._run(hand.popleft()))

    async def _run(self, lane: Lane) -> int:
        """Handle what a lane has, for one turn at most; return how many messages that were."""
        lease, held, batch = self._owner.dispatcher.lease, lane.held, lane.batch
        handle = self._limits.around(self._handle, self._owner.rules)
        settled, now, done, caution = lane.line.append, clock(), 0, lane.caution
        until = now + TURN_S
        try:
            for record in batch:
                if now >= until or held.state is not State.OPEN or now >= lease.until:
                    break
                if record.offset >= caution:
                    await handle(held, record)
                elif not await self._handle_with_care(handle, lane, record):
                    break
                failpoint("handler.after_success")
                settled(record)
                done += 1
                now = clock()
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
            return judge(self._owner, lane, done, error)
        give_back(self._owner, lane, done)
        return done

    async def _handle_with_care(
        self, handle: Callable[[Held, Record], Awaitable[Any]], lane: Lane, record: Record
    ) -> bool:
        """Handle a message that may have killed former owners; False where its holding is gone."""
        # Others wait for their turn in there, and the loop must not.
        if not await asyncio.to_thread(self._owner.begin, lane, record):
            return False
        try:
            await handle(lane.held, record)
        finally:
            self._owner.end(lane, record)
        return True


def give_back(owner: Owner, lane: Lane, done: int, *, delay_s: float = 0.0) -> None:
    """Return a lane to the dispatcher after so many messages of its batch."""
    if done == len(lane.batch):
        owner.dispatcher.done(lane)
    else:
        owner.dispatcher.finish(lane, list(lane.batch[done:]), delay_s=delay_s)


def judge(owner: Owner, lane: Lane, done: int, error: BaseException) -> int:
    """Decide what an exception of a handler means for its message and its lane; return how many are handled now."""
    held, record = lane.held, lane.batch[done]
    verdict: Verdict | None = None
    try:
        if isinstance(error, AlreadyApplied):
            lane.line.append(record)
            done += 1
        elif isinstance(error, StaleOwner):
            owner.fenced(held, "fence")
        else:
            failpoint("handler.after_failure")
            verdict = owner.failed(lane, record, error)
    except Exception as fault:  # noqa: BLE001 - a worker that died would leave a member that handles less and less
        verdict = Wait(held.attempts.get(record.offset, 0), AGAIN_S)
        log.error("judging_failed", extra={"partition": held.partition, "error": where(fault)})
    _give_back(owner, lane, done, verdict)
    return done


def _give_back(owner: Owner, lane: Lane, done: int, verdict: Verdict | None) -> None:
    """Return a lane whose next message failed, with what becomes of that."""
    leftover = list(lane.batch[done:])
    if lane.resumed or verdict is None:
        lane.verdict = verdict
        give_back(owner, lane, done)
    elif isinstance(verdict, Wait):
        give_back(owner, lane, done, delay_s=verdict.seconds)
    elif isinstance(verdict, Park):
        owner.dispatcher.park(lane, leftover, parking_by(verdict, lane, leftover[0]))
    else:
        burial = Burial(leftover[0], verdict.cause, verdict.reason, verdict.attempts, verdict.keep)
        owner.dispatcher.bury(lane, leftover, burial)


def not_awaited(answer: Any) -> HandlerFault:
    """Return the fault of a plain handler that answers a coroutine: nothing of it has run."""
    if hasattr(answer, "close"):
        answer.close()
    return HandlerFault("the handler returned an awaitable that nobody awaits: make it `async def` itself")
