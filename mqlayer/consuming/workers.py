"""Run handlers: on threads, or as coroutines on one event loop thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, Final, Protocol

from mqlayer.consuming.clock import clock
from mqlayer.consuming.dispatch import Dispatcher
from mqlayer.consuming.faults import where
from mqlayer.consuming.holdings import Held, Lane
from mqlayer.domain.message import Record
from mqlayer.errors import AlreadyApplied, HandlerFault, StaleOwner
from mqlayer.failpoints import failpoint

log = logging.getLogger(__name__)

IDLE_WAIT_S: Final = 0.25
"""How soon an idle worker looks by itself whether there is something to do."""
TURN_S: Final = 0.1
"""How long one key may keep its worker while others wait: it goes to the end of the line then."""
AGAIN_S: Final = 1.0


class Owner(Protocol):
    """What workers ask of the member they work for."""

    dispatcher: Dispatcher

    def may_start(self, held: Held, now: float) -> bool:
        """Say whether a message of this holding may be started now."""

    def settled(self, held: Held, record: Record) -> None:
        """Note that a message is handled."""

    def settled_some(self) -> None:
        """Let what was noted be sent."""

    def failed(self, held: Held, record: Record, error: BaseException) -> float:
        """Note a failed attempt; return how many seconds its key waits."""

    def fenced(self, held: Held, reason: str) -> None:
        """Drop a holding that a later owner has."""


class Outcome:
    """What became of a lane's batch: how far it came, and how long the rest waits."""

    __slots__ = ("delay_s", "done")

    def __init__(self) -> None:
        self.done = 0
        self.delay_s = 0.0


class ThreadWorkers:
    """A bounded number of threads that run plain handlers."""

    def __init__(self, owner: Owner, handle: Callable[[Held, Record], Any], *, count: int, name: str) -> None:
        self._owner, self._handle = owner, handle
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-worker-{i}", daemon=True) for i in range(count)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end; say whether all have."""
        until = clock() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - clock()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        dispatcher = self._owner.dispatcher
        hand = dispatcher.new_hand()
        while not dispatcher.stopping:
            if not dispatcher.take(hand, IDLE_WAIT_S):
                continue
            began, messages = clock(), 0
            while True:
                try:
                    lane = hand.popleft()
                except IndexError:
                    break
                messages += self._run(lane)
            self._owner.settled_some()
            dispatcher.note_pace(messages, clock() - began)

    def _run(self, lane: Lane) -> int:
        outcome = Outcome()
        with _turn(self._owner, lane, outcome):
            self._handle_batch(lane, outcome)
        return outcome.done

    def _handle_batch(self, lane: Lane, outcome: Outcome) -> None:
        owner, held, handle = self._owner, lane.held, self._handle
        until = clock() + TURN_S
        for record in lane.batch:
            now = clock()
            if now >= until or not owner.may_start(held, now):
                break
            answer = handle(held, record)
            if answer is not None and isawaitable(answer):
                raise _not_awaited(answer)
            owner.settled(held, record)
            outcome.done += 1


class LoopWorkers:
    """A bounded number of coroutines, on an event loop in a thread of its own, that run async handlers."""

    def __init__(
        self, owner: Owner, handle: Callable[[Held, Record], Awaitable[Any]], *, count: int, name: str
    ) -> None:
        self._owner, self._handle, self._count = owner, handle, count
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run_loop, name=f"{name}-loop", daemon=True)
        owner.dispatcher.on_ready = self._poke

    def start(self) -> None:
        """Start the loop's thread."""
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the coroutines to end; say whether they have."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run_loop(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, self._ready = asyncio.get_running_loop(), asyncio.Event()
        await asyncio.gather(*(self._work(self._ready) for _ in range(self._count)))

    def _poke(self) -> None:
        loop, ready = self._loop, self._ready
        if loop is not None and ready is not None:
            # Closed between two looks: then nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(ready.set)

    async def _work(self, ready: asyncio.Event) -> None:
        dispatcher = self._owner.dispatcher
        hand: deque[Lane] = dispatcher.new_hand()
        while not dispatcher.stopping:
            if not dispatcher.take_now(hand):
                ready.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ready.wait(), IDLE_WAIT_S)
                continue
            while hand:
                await self._run(hand.popleft())

    async def _run(self, lane: Lane) -> None:
        outcome = Outcome()
        with _turn(self._owner, lane, outcome):
            await self._handle_batch(lane, outcome)
        self._owner.settled_some()

    async def _handle_batch(self, lane: Lane, outcome: Outcome) -> None:
        owner, held, handle = self._owner, lane.held, self._handle
        until = clock() + TURN_S
        for record in lane.batch:
            now = clock()
            if now >= until or not owner.may_start(held, now):
                break
            await handle(held, record)
            owner.settled(held, record)
            outcome.done += 1


class _turn:  # noqa: N801 - reads as what it is: with a turn of this lane
    """One turn of a lane: whatever the handler raises is judged, and the lane goes back in any case."""

    __slots__ = ("_lane", "_outcome", "_owner")

    def __init__(self, owner: Owner, lane: Lane, outcome: Outcome) -> None:
        self._owner, self._lane, self._outcome = owner, lane, outcome

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        lane, outcome = self._lane, self._outcome
        try:
            if error is not None:
                judge(self._owner, lane, outcome, error)
        except Exception as fault:  # noqa: BLE001 - a worker that died would leave a member that handles less and less
            outcome.delay_s = AGAIN_S
            log.error("judging_failed", extra={"partition": lane.held.partition, "error": where(fault)})
        leftover = list(lane.batch[outcome.done :])
        if leftover:
            self._owner.settled_some()
        self._owner.dispatcher.finish(lane, leftover, delay_s=outcome.delay_s)
        return True


def judge(owner: Owner, lane: Lane, outcome: Outcome, error: BaseException) -> None:
    """Decide what an exception of a handler means for its message and the rest of its lane."""
    held, record = lane.held, lane.batch[outcome.done]
    if isinstance(error, AlreadyApplied):
        owner.settled(held, record)
        outcome.done += 1
    elif isinstance(error, StaleOwner):
        owner.fenced(held, "fence")
    else:
        failpoint("handler.after_failure")
        outcome.delay_s = owner.failed(held, record, error)


def _not_awaited(answer: Any) -> HandlerFault:
    """Return the fault of a plain handler that answers a coroutine: nothing of it has run."""
    if hasattr(answer, "close"):
        answer.close()
    return HandlerFault("the handler returned an awaitable that nobody awaits: make it `async def` itself")
