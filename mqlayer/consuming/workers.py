"""Run handlers: on threads, or as coroutines on one event loop thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from mqlayer.consuming.clock import clock
from mqlayer.consuming.dispatch import Dispatcher
from mqlayer.consuming.holdings import Held, Lane
from mqlayer.domain.message import Record
from mqlayer.errors import AlreadyApplied, BodyMismatch, StaleOwner
from mqlayer.failpoints import failpoint

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5


class Owner(Protocol):
    """What workers ask of the member they work for."""

    dispatcher: Dispatcher

    def may_start(self, held: Held) -> bool:
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
        owner, held, handle = self._owner, lane.held, self._handle
        batch = lane.batch
        try:
            for record in batch:
                if not owner.may_start(held):
                    break
                handle(held, record)
                owner.settled(held, record)
                outcome.done += 1
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a handler raises is its failure
            judge(owner, lane, outcome, error)
        if outcome.done < len(batch):
            owner.settled_some()
        owner.dispatcher.finish(lane, batch[outcome.done :], delay_s=outcome.delay_s)
        return outcome.done


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
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run_loop(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, self._ready = asyncio.get_running_loop(), asyncio.Event()
        await asyncio.gather(*(self._work(self._ready) for _ in range(self._count)))

    def _poke(self) -> None:
        loop, ready = self._loop, self._ready
        if loop is not None and ready is not None and not loop.is_closed():
            loop.call_soon_threadsafe(ready.set)

    async def _work(self, ready: asyncio.Event) -> None:
        dispatcher = self._owner.dispatcher
        hand: deque[Lane] = dispatcher.new_hand()
        while not dispatcher.stopping:
            if not dispatcher.take_now(hand):
                ready.clear()
                wait_s = min(IDLE_WAIT_S, dispatcher.next_due_s())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ready.wait(), max(wait_s, 0.001))
                continue
            while hand:
                await self._run(hand.popleft())
            self._owner.settled_some()

    async def _run(self, lane: Lane) -> None:
        outcome = Outcome()
        owner, held = self._owner, lane.held
        batch = lane.batch
        try:
            for record in batch:
                if not owner.may_start(held):
                    break
                await self._handle(held, record)
                owner.settled(held, record)
                outcome.done += 1
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a handler raises is its failure
            judge(owner, lane, outcome, error)
        owner.settled_some()
        owner.dispatcher.finish(lane, batch[outcome.done :], delay_s=outcome.delay_s)


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


def where(error: BaseException) -> str:
    """Return what a log may say of a handler's exception: its type and place, never its text."""
    if isinstance(error, BodyMismatch):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
