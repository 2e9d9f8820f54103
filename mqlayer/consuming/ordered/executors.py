"""Run handlers, in threads or as coroutines."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, Final, Protocol

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.error_text import where
from mqlayer.consuming.engine.executors import AsyncioExecutor, ThreadExecutor
from mqlayer.consuming.engine.failure_actions import FailureAction, ParkKey, RetryInPlace
from mqlayer.consuming.engine.timeouts import AsyncioTimeouts
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, OwnershipState, parked_key_for
from mqlayer.domain.message import Record
from mqlayer.domain.retry_rules import RetryRules
from mqlayer.errors import AlreadyApplied, HandlerFault, StaleOwner
from mqlayer.failpoints import failpoint
from mqlayer.parking import DeadLetterEntry

log = logging.getLogger(__name__)

IDLE_WAIT_S: Final = 0.25
"""Idle poll interval."""
TIME_SLICE_S: Final = 0.1
"""How long a key keeps its worker while others wait."""
RETRY_S: Final = 1.0


class ExecutorOwner(Protocol):
    """The member, as its workers use it."""

    dispatcher: Dispatcher
    rules: RetryRules

    def handled(self, count: int) -> None:
        """Count handled messages; wake the settlers."""

    def failed(self, key_queue: KeyQueue, record: Record, error: BaseException) -> FailureAction:
        """Count a failed attempt; return what follows."""

    def begin(self, key_queue: KeyQueue, record: Record) -> bool:
        """Start a suspect message; False where its partition is gone."""

    def end(self, key_queue: KeyQueue, record: Record) -> None:
        """End a guarded start."""

    def fenced(self, owned: OwnedPartition, reason: str) -> None:
        """Drop a partition that a later owner has."""


class OrderedThreadExecutor(ThreadExecutor):
    """Threads that run plain handlers."""

    def __init__(self, owner: ExecutorOwner, handle: Callable[..., Any], *, count: int, name: str) -> None:
        super().__init__(count=count, name=name)
        self._owner, self._handle = owner, handle

    def _work(self) -> None:
        dispatcher = self._owner.dispatcher
        local_queue = dispatcher.new_local_queue()
        while not dispatcher.stopping:
            if not dispatcher.fill(local_queue, IDLE_WAIT_S):
                continue
            began = now = clock()
            messages = 0
            while True:
                try:
                    key_queue = local_queue.popleft()
                except IndexError:
                    break
                done, now = self._run(key_queue, now)
                messages += done
            self._owner.handled(messages)
            dispatcher.note_pace(messages, now - began)

    def _run(self, key_queue: KeyQueue, now: float) -> tuple[int, float]:
        lease, owned, batch = self._owner.dispatcher.lease, key_queue.owned, key_queue.batch
        handle = self._limits.wrap(self._handle, self._owner.rules)
        settled, until, done, guarded_below = key_queue.handled.append, now + TIME_SLICE_S, 0, key_queue.guarded_below
        try:
            for record in batch:
                if now >= until or owned.state is not OwnershipState.OPEN or now >= lease.until:
                    break
                if record.offset < guarded_below:
                    if not self._handle_with_care(handle, key_queue, record):
                        break
                    answer = None
                else:
                    answer = handle(owned, record)
                if answer is not None and isawaitable(answer):
                    raise not_awaited(answer)
                failpoint("handler.after_success")
                settled(record)
                done += 1
                now = clock()
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
            return decide_failure(self._owner, key_queue, done, error), clock()
        return_queue(self._owner, key_queue, done)
        return done, now

    def _handle_with_care(
        self, handle: Callable[[OwnedPartition, Record], Any], key_queue: KeyQueue, record: Record
    ) -> bool:
        if not self._owner.begin(key_queue, record):
            return False
        try:
            answer = handle(key_queue.owned, record)
            if answer is not None and isawaitable(answer):
                raise not_awaited(answer)
        finally:
            self._owner.end(key_queue, record)
        return True


class OrderedAsyncioExecutor(AsyncioExecutor):
    """Coroutines that run async handlers."""

    def __init__(self, owner: ExecutorOwner, handle: Callable[..., Awaitable[Any]], *, count: int, name: str) -> None:
        super().__init__(count=count, name=name)
        self._owner, self._handle = owner, handle
        self._limits = AsyncioTimeouts()
        owner.dispatcher.on_ready = self.wake

    async def _work(self, ready: asyncio.Event) -> None:
        dispatcher = self._owner.dispatcher
        local_queue: deque[KeyQueue] = dispatcher.new_local_queue()
        while not dispatcher.stopping:
            if not dispatcher.fill_now(local_queue):
                await self.wait(ready, IDLE_WAIT_S)
                continue
            while local_queue:
                self._owner.handled(await self._run(local_queue.popleft()))

    async def _run(self, key_queue: KeyQueue) -> int:
        lease, owned, batch = self._owner.dispatcher.lease, key_queue.owned, key_queue.batch
        handle = self._limits.wrap(self._handle, self._owner.rules)
        settled, now, done, guarded_below = key_queue.handled.append, clock(), 0, key_queue.guarded_below
        until = now + TIME_SLICE_S
        try:
            for record in batch:
                if now >= until or owned.state is not OwnershipState.OPEN or now >= lease.until:
                    break
                if record.offset >= guarded_below:
                    await handle(owned, record)
                elif not await self._handle_with_care(handle, key_queue, record):
                    break
                failpoint("handler.after_success")
                settled(record)
                done += 1
                now = clock()
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
            return decide_failure(self._owner, key_queue, done, error)
        return_queue(self._owner, key_queue, done)
        return done

    async def _handle_with_care(
        self, handle: Callable[[OwnedPartition, Record], Awaitable[Any]], key_queue: KeyQueue, record: Record
    ) -> bool:
        # `begin` waits for other workers; the loop must not.
        if not await asyncio.to_thread(self._owner.begin, key_queue, record):
            return False
        try:
            await handle(key_queue.owned, record)
        finally:
            self._owner.end(key_queue, record)
        return True


def return_queue(owner: ExecutorOwner, key_queue: KeyQueue, done: int, *, delay_s: float = 0.0) -> None:
    """Give back a key queue after `done` messages."""
    if done == len(key_queue.batch):
        owner.dispatcher.done(key_queue)
    else:
        owner.dispatcher.finish(key_queue, list(key_queue.batch[done:]), delay_s=delay_s)


def decide_failure(owner: ExecutorOwner, key_queue: KeyQueue, done: int, error: BaseException) -> int:
    """Act on a handler's exception; return the handled count."""
    owned, record = key_queue.owned, key_queue.batch[done]
    action: FailureAction | None = None
    try:
        if isinstance(error, AlreadyApplied):
            key_queue.handled.append(record)
            done += 1
        elif isinstance(error, StaleOwner):
            owner.fenced(owned, "fence")
        else:
            failpoint("handler.after_failure")
            action = owner.failed(key_queue, record, error)
    except Exception as fault:  # noqa: BLE001 - a worker that died would leave a member that handles less and less
        action = RetryInPlace(owned.attempts.get(record.offset, 0), RETRY_S)
        log.error("failure_decision_failed", extra={"partition": owned.partition, "error": where(fault)})
    _return_queue(owner, key_queue, done, action)
    return done


def _return_queue(owner: ExecutorOwner, key_queue: KeyQueue, done: int, action: FailureAction | None) -> None:
    leftover = list(key_queue.batch[done:])
    if key_queue.resumed or action is None:
        key_queue.action = action
        return_queue(owner, key_queue, done)
    elif isinstance(action, RetryInPlace):
        return_queue(owner, key_queue, done, delay_s=action.seconds)
    elif isinstance(action, ParkKey):
        owner.dispatcher.park(key_queue, leftover, parked_key_for(action, key_queue, leftover[0]))
    else:
        dead_letter = DeadLetterEntry(leftover[0], action.cause, action.reason, action.attempts, action.keep_body)
        owner.dispatcher.dead_letter(key_queue, leftover, dead_letter)


def not_awaited(answer: Any) -> HandlerFault:
    """Return the fault of a plain handler that returns an awaitable."""
    if hasattr(answer, "close"):
        answer.close()
    return HandlerFault("the handler returned an awaitable that nobody awaits: make it `async def` itself")
