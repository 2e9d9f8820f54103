"""Run the handlers of a shared group: on threads, or as coroutines on one event loop thread."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, Protocol

from mqlayer.consuming.clock import clock
from mqlayer.consuming.faults import where
from mqlayer.consuming.limits import LoopLimits
from mqlayer.consuming.loops import HandlerThreads, LoopThread
from mqlayer.consuming.sharing.pool import TURN_S, Batch, Pool, all_of
from mqlayer.consuming.workers import IDLE_WAIT_S, not_awaited
from mqlayer.domain.message import Record
from mqlayer.domain.retrying import RetryRules
from mqlayer.errors import AlreadyApplied
from mqlayer.failpoints import failpoint

log = logging.getLogger(__name__)


class SharedOwner(Protocol):
    """What workers ask of the member they work for."""

    pool: Pool
    rules: RetryRules

    def handled(self, batch: Batch, offsets: list[int]) -> None:
        """Count what was handled, and have it settled."""

    def failed(self, batch: Batch, record: Record, error: BaseException) -> None:
        """Decide what becomes of a message that failed, and have that done."""

    def begin(self, batch: Batch) -> bool:
        """Count an attempt at a suspect before it is started; False where it is not to be."""


class SharedThreads(HandlerThreads):
    """Threads that run plain handlers."""

    def __init__(self, owner: SharedOwner, handle: Callable[[Any, Record], Any], *, count: int, name: str) -> None:
        super().__init__(count=count, name=name)
        self._owner, self._handle = owner, handle

    def _work(self) -> None:
        owner, pool = self._owner, self._owner.pool
        hand = pool.new_hand()
        while not pool.stopping:
            found = pool.take(IDLE_WAIT_S)
            if found is None:
                continue
            batch, records = found
            if batch.suspect and not _begin(owner, batch):
                pool.put_back(batch, ())
                continue
            handle: Any = self._limits.around(self._handle, owner.rules)
            began = now = clock()
            todo, done = hand.begin(batch, records, now)
            until, lost, take, note, count = began + TURN_S, batch.lost, todo.popleft, done.append, 0
            record = records[0]
            try:
                while todo and now < until and not owner.pool.stopping and not batch.dropped:
                    try:
                        record = take()
                    except IndexError:
                        # Others got the rest meanwhile.
                        break
                    offset = record.offset
                    if lost and offset in lost:
                        continue
                    hand.offset, hand.since = offset, now
                    answer = handle(batch, record)
                    if answer is not None and isawaitable(answer):
                        raise not_awaited(answer)
                    note(offset)
                    count += 1
                    now = clock()
            except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
                _judge(owner, batch, record, error, done)
                now = clock()
            hand.work = None
            _end(owner, batch, all_of(done))
            pool.put_back(batch, all_of(todo))
            pool.note_pace(max(1, count), now - began)


class SharedLoop(LoopThread):
    """Coroutines that run async handlers."""

    def __init__(
        self, owner: SharedOwner, handle: Callable[[Any, Record], Awaitable[Any]], *, count: int, name: str
    ) -> None:
        super().__init__(count=count, name=name)
        self._owner, self._handle, self._limits = owner, handle, LoopLimits()
        owner.pool.on_ready = self.poke

    async def _work(self, ready: asyncio.Event) -> None:
        owner, pool = self._owner, self._owner.pool
        hand = pool.new_hand()
        while not pool.stopping:
            found = pool.take(0.0)
            if found is None:
                await self.rest(ready, IDLE_WAIT_S)
                continue
            batch, records = found
            # It waits for its node, and the loop must not.
            if batch.suspect and not await asyncio.to_thread(_begin, owner, batch):
                pool.put_back(batch, ())
                continue
            handle: Any = self._limits.around(self._handle, owner.rules)
            began = now = clock()
            todo, done = hand.begin(batch, records, now)
            record, count = records[0], 0
            try:
                while todo and now < began + TURN_S and not owner.pool.stopping and not batch.dropped:
                    try:
                        record = todo.popleft()
                    except IndexError:
                        break
                    if record.offset in batch.lost:
                        continue
                    hand.offset, hand.since = record.offset, now
                    await handle(batch, record)
                    done.append(record.offset)
                    count += 1
                    now = clock()
            except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
                _judge(owner, batch, record, error, done)
                now = clock()
            hand.work = None
            _end(owner, batch, all_of(done))
            pool.put_back(batch, all_of(todo))
            pool.note_pace(max(1, count), now - began)


def _begin(owner: SharedOwner, batch: Batch) -> bool:
    try:
        return owner.begin(batch)
    except Exception as error:  # noqa: BLE001 - a worker that died would leave a member that handles less and less
        log.warning("start_not_noted", extra={"partition": batch.partition, "error": where(error)})
        return False


def _judge(owner: SharedOwner, batch: Batch, record: Record, error: BaseException, done: deque[int]) -> None:
    if isinstance(error, AlreadyApplied):
        done.append(record.offset)
        return
    try:
        owner.failed(batch, record, error)
    except Exception as fault:  # noqa: BLE001 - as above; the message is taken from us after its invisible time
        batch.lost.add(record.offset)
        owner.pool.end(batch, (record.offset,))
        log.error("judging_failed", extra={"partition": batch.partition, "error": where(fault)})


def _end(owner: SharedOwner, batch: Batch, done: list[int]) -> None:
    if done:
        failpoint("shared.after_handling")
        owner.handled(batch, done)
