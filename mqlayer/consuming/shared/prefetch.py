"""Messages that a shared member has read. Its pace bounds read-ahead."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, Literal

from mqlayer.consuming.engine.circuit_breaker import CircuitBreaker
from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.shared.fetched_batch import FetchedBatch
from mqlayer.consuming.shared.ready_slices import ReadySlices, WorkSlice
from mqlayer.consuming.shared.shared_classes import ReadAhead, SharedClasses
from mqlayer.domain.message import Record
from mqlayer.domain.routing import NodeId

AHEAD_S: Final = 0.5
"""Read-ahead, in seconds of work."""
SLICE_S: Final = 0.005
"""Work per slice."""
TIME_SLICE_S: Final = 0.05
SLICE_LIMIT: Final = 500
FRESH: Final = 0.9
"""Messages extended longer ago, in visibility timeouts, don't start."""


class Suspects:
    """Messages that may end their process: those without a guarded start run beside each other, the others alone."""

    def __init__(self) -> None:
        self._new: deque[FetchedBatch] = deque()
        self._blamed: deque[FetchedBatch] = deque()
        self._guarded, self._alone = 0, False

    def __bool__(self) -> bool:
        return bool(self._new or self._blamed)

    def put(self, batch: FetchedBatch) -> None:
        """Add one."""
        (self._blamed if batch.attempts.get(batch.records[0].offset) else self._new).append(batch)

    def next(self, begin: Callable[[FetchedBatch], WorkSlice | None]) -> WorkSlice | None:
        """Take one that may start, and that `begin` lets begin."""
        if self._alone or not (self._new or (self._blamed and not self._guarded)):
            return None
        waiting = self._new or self._blamed
        for batch in waiting:
            found = begin(batch)
            if found is not None:
                self._alone = not self._new
                self._guarded += 1
                waiting.remove(batch)
                return found
        return None

    def ended(self) -> None:
        """Count one less."""
        self._guarded -= 1
        self._alone = False

    def batches(self) -> list[FetchedBatch]:
        """Return those that have not started."""
        return [*self._new, *self._blamed]

    def keep(self, wanted: Callable[[FetchedBatch], bool]) -> None:
        """Take the others out."""
        self._new = deque(batch for batch in self._new if wanted(batch))
        self._blamed = deque(batch for batch in self._blamed if wanted(batch))


class WorkerSlot:
    """A worker's batch, unstarted records (others may take them), and handled offsets."""

    __slots__ = ("offset", "since", "work")

    def __init__(self) -> None:
        self.work: tuple[WorkSlice, deque[Record], deque[int]] | None = None
        self.offset, self.since = 0, 0.0

    def begin(self, work: WorkSlice, now: float) -> tuple[deque[Record], deque[int]]:
        """Begin records; return unstarted and handled ones."""
        todo: deque[Record] = deque(work.records)
        done: deque[int] = deque()
        self.since = now
        self.work = (work, todo, done)
        return todo, done


def drain(queue: deque[Any]) -> list[Any]:
    """Empty a queue, despite other consumers."""
    found: list[Any] = []
    with contextlib.suppress(IndexError):
        while True:
            found.append(queue.popleft())
    return found


class Prefetch:
    """The read messages of one member. Thread-safe."""

    def __init__(
        self,
        *,
        concurrency: int,
        prefetch_count: int,
        prefetch_bytes: int,
        visibility_timeout_s: float,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self._breaker = breaker or CircuitBreaker()
        self._concurrency, self._count_limit, self._bytes_limit = concurrency, prefetch_count, prefetch_bytes
        self.visibility_timeout_s = visibility_timeout_s
        self._changed = threading.Condition()
        self._ready = ReadySlices(visibility_timeout_s * FRESH)
        self.classes = SharedClasses(self._changed, self._ready, self._read_ahead, self.wake_workers)
        self._suspects = Suspects()
        self._batches: dict[int, FetchedBatch] = {}
        self._worker_slots: list[WorkerSlot] = []
        self._pace_s = 0.01
        self._unreachable: set[NodeId] = set()
        self.count = self.bytes = 0
        self.stopping = False
        self._on_ready: Callable[[], None] | None = None

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when something is ready."""
        self._on_ready = wake

    # -- reading -------------------------------------------------------------------------------------------------------

    def capacity(self) -> int:
        """Return how many more records may be read."""
        count, size = self.count, self.bytes
        if self._unreachable:
            stuck = [batch for batch in self.batches() if batch.assignment.node in self._unreachable]
            count -= sum(len(batch.records) - len(batch.ended) for batch in stuck)
            size -= sum(batch.size for batch in stuck)
        return 0 if size >= self._bytes_limit else self._read_ahead().limit - count

    def _read_ahead(self) -> ReadAhead:
        limit = max(2 * self._concurrency, int(self._concurrency * AHEAD_S / self._pace_s))
        return ReadAhead(self.count, min(self._count_limit, limit), self.bytes, self._bytes_limit)

    def note_node(self, node_id: NodeId, *, unreachable: bool) -> None:
        """Messages of silent nodes take no capacity."""
        if unreachable != (node_id in self._unreachable):
            self._unreachable = self._unreachable | {node_id} if unreachable else self._unreachable - {node_id}

    def add(self, batch: FetchedBatch) -> None:
        """Count a batch that is not ready."""
        with self._changed:
            self._batches[id(batch)] = batch
            self.count += len(batch.records)
            self.bytes += batch.size

    def put(self, batch: FetchedBatch) -> None:
        """Make a batch ready."""
        with self._changed:
            if batch.suspect:
                self._suspects.put(batch)
            else:
                self._ready.put(batch, batch.records)
        self.wake_workers()

    # -- handling ------------------------------------------------------------------------------------------------------

    def new_worker_slot(self) -> WorkerSlot:
        """Return a worker's slot."""
        worker_slot = WorkerSlot()
        self._worker_slots.append(worker_slot)
        return worker_slot

    def next_slice(self, timeout_s: float) -> WorkSlice | None:
        """Return work, or None at the timeout or while stopping."""
        with self._changed:
            found = self._next()
            if found is None and timeout_s:
                self._changed.wait(timeout_s)
                found = self._next()
            return found

    def has_ready(self) -> bool:
        """Whether a message could begin."""
        with self._changed:
            return bool(self._ready or self._suspects)

    def wake_workers(self) -> None:
        """Have workers look again."""
        with self._changed:
            self._changed.notify_all()
        if self._on_ready is not None:
            self._on_ready()

    def _next(self) -> WorkSlice | None:
        if self.stopping:
            return None
        begin_suspect = self._ready.begin_beside
        if not self._breaker.engaged:
            count = max(1, min(SLICE_LIMIT, int(SLICE_S / self._pace_s)))
            return self._suspects.next(begin_suspect) or self._ready.next(count)
        # One message, a suspect where nothing else waits.
        found = (self._ready.next(1) or self._suspects.next(begin_suspect)) if self._breaker.room() else None
        if found is not None:
            self._breaker.begin(found.records[0])
        return found

    def take_unstarted(self, of: Callable[[FetchedBatch], bool]) -> list[tuple[FetchedBatch, list[int]]]:
        """Remove matching unstarted messages; return batches and offsets."""
        with self._changed:
            found = self._ready.take(of)
            found += [WorkSlice(batch, batch.records) for batch in self._suspects.batches() if of(batch)]
            self._suspects.keep(lambda batch: not of(batch))
        open_of = [(one.batch, set(one.batch.open), one.records) for one in found if not one.batch.dropped]
        return [(batch, [r.offset for r in records if r.offset in left]) for batch, left, records in open_of]

    def return_slice(self, work: WorkSlice, records: Sequence[Record]) -> None:
        """End a slice; take back unstarted records, or end a suspect's start."""
        with self._changed:
            if work.batch.suspect:
                self._suspects.ended()
            if records:
                self._ready.put_first(work, records)
            self._ready.ended(work.turn)
            woken = bool(records) or (work.turn is not None and self.classes.limits.concurrency is not None)
            if woken or work.batch.suspect:
                self._changed.notify_all()
        if woken and self._on_ready is not None:
            self._on_ready()

    def reclaim_slow(self) -> list[tuple[FetchedBatch, list[int]]]:
        """Free slow workers' unstarted records; return handled offsets."""
        now, found = clock(), []
        for worker_slot in self._worker_slots:
            work = worker_slot.work
            # Only its worker handles a suspect, and ends its guarded start.
            if work is None or work[0].batch.suspect or now - worker_slot.since < TIME_SLICE_S:
                continue
            of_worker, todo, done = work
            rest = drain(todo)
            if rest:
                with self._changed:
                    self._ready.put_first(of_worker, rest)
                self.wake_workers()
            handled = drain(done)
            if handled:
                found.append((of_worker.batch, handled))
        return found

    def note_pace(self, count: int, seconds: float) -> None:
        """Update the mean handler time."""
        if count:
            self._pace_s = max(1e-7, 0.7 * self._pace_s + 0.3 * seconds / count)

    # -- ending --------------------------------------------------------------------------------------------------------

    def end(self, batch: FetchedBatch, offsets: Iterable[int]) -> None:
        """Free ended messages."""
        with self._changed:
            if id(batch) not in self._batches:
                return
            before = len(batch.ended)
            batch.ended.update(offsets)
            self.count -= len(batch.ended) - before
            if len(batch.ended) >= len(batch.records):
                self._forget(batch)

    def lose(self, batch: FetchedBatch, offsets: Collection[int]) -> None:
        """Free messages lost to other members."""
        batch.exclude(offsets)
        self.end(batch, offsets)

    def drop(self, doomed: Callable[[FetchedBatch], bool]) -> None:
        """Forget lost batches."""
        with self._changed:
            for batch in [batch for batch in self._batches.values() if doomed(batch)]:
                batch.dropped = True
                self.count -= len(batch.records) - len(batch.ended)
                self._forget(batch)
            self._ready.forget_dropped()
            self._suspects.keep(lambda batch: not batch.dropped)

    def status_of(self, batch: FetchedBatch, offset: int) -> Literal["ours", "unsure", "gone"]:
        """Say whose a message is; `unsure`: the node must confirm."""
        if batch.dropped or offset in batch.lost:
            return "gone"
        late = clock() - batch.extended_at > self.visibility_timeout_s * FRESH
        return "unsure" if late or offset in batch.hung else "ours"

    def _forget(self, batch: FetchedBatch) -> None:
        del self._batches[id(batch)]
        self.bytes -= batch.size

    def batches(self) -> list[FetchedBatch]:
        """Return all batches."""
        with self._changed:
            return list(self._batches.values())

    def hung(self, limit_s: float) -> set[tuple[int, int]]:
        """Return (batch id, offset) of handlers running beyond `limit_s`."""
        now = clock()
        found = [(worker_slot.work, worker_slot.offset, worker_slot.since) for worker_slot in self._worker_slots]
        return {(id(work[0].batch), offset) for work, offset, since in found if work and now - since > limit_s}

    def running(self) -> set[tuple[int, int]]:
        """Return (batch id, offset) of all handlers."""
        return self.hung(-1.0)

    def stop(self) -> None:
        """Stop starting messages."""
        with self._changed:
            self.stopping = True
            self._changed.notify_all()
        if self._on_ready is not None:
            self._on_ready()
