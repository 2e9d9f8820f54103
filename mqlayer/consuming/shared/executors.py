"""Run the handlers of a shared group, in threads or as coroutines."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, Protocol

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.error_text import where
from mqlayer.consuming.engine.executors import AsyncioExecutor, ThreadExecutor
from mqlayer.consuming.engine.timeouts import AsyncioTimeouts
from mqlayer.consuming.ordered.executors import IDLE_WAIT_S, not_awaited
from mqlayer.consuming.shared.prefetch import TIME_SLICE_S, FetchedBatch, Prefetch, drain
from mqlayer.domain.message import Record
from mqlayer.domain.retry_rules import RetryRules
from mqlayer.errors import AlreadyApplied
from mqlayer.failpoints import failpoint

log = logging.getLogger(__name__)


class SharedExecutorOwner(Protocol):
    """The member, as its workers use it."""

    prefetch: Prefetch
    rules: RetryRules

    def handled(self, batch: FetchedBatch, offsets: list[int]) -> None:
        """Count and settle handled messages."""

    def failed(self, batch: FetchedBatch, record: Record, error: BaseException) -> None:
        """Decide a failed message's next step."""

    def begin(self, batch: FetchedBatch) -> bool:
        """Count a suspect's attempt; False where it must not start."""


class SharedThreadExecutor(ThreadExecutor):
    """Threads that run plain handlers."""

    def __init__(
        self, owner: SharedExecutorOwner, handle: Callable[[Any, Record], Any], *, count: int, name: str
    ) -> None:
        super().__init__(count=count, name=name)
        self._owner, self._handle = owner, handle

    def _work(self) -> None:
        owner, prefetch = self._owner, self._owner.prefetch
        worker_slot = prefetch.new_worker_slot()
        while not prefetch.stopping:
            found = prefetch.next_slice(IDLE_WAIT_S)
            if found is None:
                continue
            batch, records = found
            if batch.suspect and not _begin(owner, batch):
                prefetch.return_slice(batch, ())
                continue
            handle: Any = self._limits.wrap(self._handle, owner.rules)
            began = now = clock()
            todo, done = worker_slot.begin(batch, records, now)
            until, lost, take, note, count = began + TIME_SLICE_S, batch.lost, todo.popleft, done.append, 0
            record = records[0]
            try:
                while todo and now < until and not owner.prefetch.stopping and not batch.dropped:
                    try:
                        record = take()
                    except IndexError:
                        # Others took the rest.
                        break
                    offset = record.offset
                    if lost and offset in lost:
                        continue
                    worker_slot.offset, worker_slot.since = offset, now
                    answer = handle(batch, record)
                    if answer is not None and isawaitable(answer):
                        raise not_awaited(answer)
                    note(offset)
                    count += 1
                    now = clock()
            except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
                _judge(owner, batch, record, error, done)
                now = clock()
            worker_slot.work = None
            _end(owner, batch, drain(done))
            prefetch.return_slice(batch, drain(todo))
            prefetch.note_pace(max(1, count), now - began)


class SharedAsyncioExecutor(AsyncioExecutor):
    """Coroutines that run async handlers."""

    def __init__(
        self, owner: SharedExecutorOwner, handle: Callable[[Any, Record], Awaitable[Any]], *, count: int, name: str
    ) -> None:
        super().__init__(count=count, name=name)
        self._owner, self._handle, self._limits = owner, handle, AsyncioTimeouts()
        owner.prefetch.on_ready = self.wake

    async def _work(self, ready: asyncio.Event) -> None:
        owner, prefetch = self._owner, self._owner.prefetch
        worker_slot = prefetch.new_worker_slot()
        while not prefetch.stopping:
            found = prefetch.next_slice(0.0)
            if found is None:
                await self.wait(ready, IDLE_WAIT_S)
                continue
            batch, records = found
            # `_begin` waits for the node; the loop must not.
            if batch.suspect and not await asyncio.to_thread(_begin, owner, batch):
                prefetch.return_slice(batch, ())
                continue
            handle: Any = self._limits.wrap(self._handle, owner.rules)
            began = now = clock()
            todo, done = worker_slot.begin(batch, records, now)
            record, count = records[0], 0
            try:
                while todo and now < began + TIME_SLICE_S and not owner.prefetch.stopping and not batch.dropped:
                    try:
                        record = todo.popleft()
                    except IndexError:
                        break
                    if record.offset in batch.lost:
                        continue
                    worker_slot.offset, worker_slot.since = record.offset, now
                    await handle(batch, record)
                    done.append(record.offset)
                    count += 1
                    now = clock()
            except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
                _judge(owner, batch, record, error, done)
                now = clock()
            worker_slot.work = None
            _end(owner, batch, drain(done))
            prefetch.return_slice(batch, drain(todo))
            prefetch.note_pace(max(1, count), now - began)


def _begin(owner: SharedExecutorOwner, batch: FetchedBatch) -> bool:
    try:
        return owner.begin(batch)
    except Exception as error:  # noqa: BLE001 - a worker that died would leave a member that handles less and less
        log.warning("start_not_recorded", extra={"partition": batch.partition, "error": where(error)})
        return False


def _judge(
    owner: SharedExecutorOwner, batch: FetchedBatch, record: Record, error: BaseException, done: deque[int]
) -> None:
    if isinstance(error, AlreadyApplied):
        done.append(record.offset)
        return
    try:
        owner.failed(batch, record, error)
    except Exception as fault:  # noqa: BLE001 - as above; its visibility timeout frees the message
        batch.lost.add(record.offset)
        owner.prefetch.end(batch, (record.offset,))
        log.error("failure_decision_failed", extra={"partition": batch.partition, "error": where(fault)})


def _end(owner: SharedExecutorOwner, batch: FetchedBatch, done: list[int]) -> None:
    if done:
        failpoint("shared.after_handling")
        owner.handled(batch, done)
