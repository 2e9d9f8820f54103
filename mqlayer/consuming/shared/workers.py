"""Workers of shared groups."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from inspect import isawaitable
from typing import Any

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.executors import Timeouts, Worker, not_awaited
from mqlayer.consuming.engine.live_settings import LiveSettings
from mqlayer.consuming.engine.process_spans import ProcessSpans, acalled, called
from mqlayer.consuming.shared.failures import SharedFailures, key_of
from mqlayer.consuming.shared.fetched_batch import FetchedBatch
from mqlayer.consuming.shared.prefetch import TIME_SLICE_S, Prefetch, drain
from mqlayer.consuming.shared.ready_slices import WorkSlice
from mqlayer.consuming.shared.results import SharedResults
from mqlayer.domain.message import Record
from mqlayer.errors import AlreadyApplied
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.runtime.error_text import where

log = event_logger(__name__)

Handle = Callable[[Any, Record], Any]


class SliceWorker(Worker):
    """Takes slices of what the member has read."""

    def __init__(
        self,
        handle: Handle,
        prefetch: Prefetch,
        spans: ProcessSpans | None,
        settings: LiveSettings,
        results: SharedResults,
        failures: SharedFailures,
        limits: Timeouts,
    ) -> None:
        self._handle, self._prefetch, self._settings = handle, prefetch, settings
        self._results, self._failures, self._limits = results, failures, limits
        self._spans, self._breaker = spans, settings.breaker
        self._slot = prefetch.new_worker_slot()
        self._slice: WorkSlice | None = None

    @property
    def stopping(self) -> bool:
        """Whether to end."""
        return self._prefetch.stopping

    def take(self, timeout_s: float) -> bool:
        """Take a slice."""
        self._slice = self._prefetch.next_slice(timeout_s)
        return self._slice is not None

    def run(self) -> None:
        """Handle it, plain."""
        work = self._slice
        if work is None:
            return
        batch = work.batch
        if batch.suspect and not self._begin(batch):
            self._prefetch.return_slice(work, ())
            return
        if self._gives_back(work):
            return
        work = self._living(work)
        records = work.records
        if not records:
            return
        handle: Any = self._limits.wrap(self._handle, self._settings.rules)
        prefetch, worker_slot = self._prefetch, self._slot
        began = now = clock()
        todo, done = worker_slot.begin(work, now)
        until, lost, take, note, count = began + TIME_SLICE_S, batch.lost, todo.popleft, done.append, 0
        spans = self._spans
        record = records[0]
        try:
            while todo and now < until and not prefetch.stopping and not batch.dropped:
                try:
                    record = take()
                except IndexError:
                    # Others took the rest.
                    break
                offset = record.offset
                if lost and offset in lost:
                    continue
                worker_slot.offset, worker_slot.since = offset, now
                answer = called(spans, handle, batch, record)
                if answer is not None and isawaitable(answer):
                    raise not_awaited(answer)
                note(offset)
                count += 1
                now = clock()
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
            self._failed(batch, record, error, done)
            now = clock()
        self._note(batch, records, count, began)
        self._end(work, todo, done)
        prefetch.note_pace(max(1, count), now - began)

    async def arun(self) -> None:
        """Handle it, async."""
        work = self._slice
        if work is None:
            return
        batch = work.batch
        # `_begin` waits for the node; the loop must not.
        if batch.suspect and not await asyncio.to_thread(self._begin, batch):
            self._prefetch.return_slice(work, ())
            return
        if self._gives_back(work):
            return
        work = self._living(work)
        records = work.records
        if not records:
            return
        handle: Any = self._limits.wrap(self._handle, self._settings.rules)
        prefetch, worker_slot = self._prefetch, self._slot
        began = now = clock()
        todo, done = worker_slot.begin(work, now)
        record, count = records[0], 0
        try:
            while todo and now < began + TIME_SLICE_S and not prefetch.stopping and not batch.dropped:
                try:
                    record = todo.popleft()
                except IndexError:
                    break
                if record.offset in batch.lost:
                    continue
                worker_slot.offset, worker_slot.since = record.offset, now
                await acalled(self._spans, handle, batch, record)
                done.append(record.offset)
                count += 1
                now = clock()
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its failure
            self._failed(batch, record, error, done)
            now = clock()
        self._note(batch, records, count, began)
        self._end(work, todo, done)
        prefetch.note_pace(max(1, count), now - began)

    def _gives_back(self, work: WorkSlice) -> bool:
        """Give back what the circuit breaker does not admit. A suspect's start is counted: it runs."""
        if work.batch.suspect or not self._breaker.engaged or self._breaker.is_admitted(work.records[0]):
            return False
        self._prefetch.return_slice(work, work.records)
        return True

    def _living(self, work: WorkSlice) -> WorkSlice:
        """Return the slice without expired messages; without any, it is given back."""
        expiry, batch, records = self._settings.expiry, work.batch, work.records
        if expiry is None or batch.claim is not None or not expiry.may_have_ended(records):
            return work
        now = clock()
        ended = [one for one in records if one.offset not in batch.lost and expiry.has_ended(one, now)]
        if not ended:
            return work
        self._failures.expired(batch, ended, expiry)
        gone = {one.offset for one in ended}
        living = [one for one in records if one.offset not in gone]
        if not living:
            if self._breaker.watching:
                self._breaker.ended(records[0], b"", 0)
            self._prefetch.return_slice(work, ())
        return work._replace(records=living)

    def _note(self, batch: FetchedBatch, records: Sequence[Record], count: int, began: float) -> None:
        """Tell the circuit breaker which keys were handled."""
        if self._breaker.watching:
            for record in [one for one in records if one.offset not in batch.lost][:count]:
                self._breaker.ended(record, key_of(record), 1, since=began)
            self._breaker.ended(records[0], b"", 0)

    def _begin(self, batch: FetchedBatch) -> bool:
        try:
            return self._results.begin(batch)
        except Exception as error:  # noqa: BLE001 - a worker that died would leave a member that handles less and less
            log.warning("start_not_recorded", extra={"partition": batch.partition, "error": where(error)})
            return False

    def _failed(self, batch: FetchedBatch, record: Record, error: BaseException, done: deque[int]) -> None:
        if isinstance(error, AlreadyApplied):
            done.append(record.offset)
            return
        try:
            self._failures.failed(batch, record, error)
        except Exception as fault:  # noqa: BLE001 - as above; its visibility timeout frees the message
            self._prefetch.lose(batch, (record.offset,))
            log.error("failure_decision_failed", extra={"partition": batch.partition, "error": where(fault)})

    def _end(self, work: WorkSlice, todo: deque[Record], done: deque[int]) -> None:
        self._slot.work = None
        handled = drain(done)
        if handled:
            failpoint("shared.after_handling")
            self._results.handled(work.batch, handled)
        self._prefetch.return_slice(work, drain(todo))
