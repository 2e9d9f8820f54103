"""What a member of a shared group has in hand: batches of records as they were read, handed to workers in slices.

The pool is bounded by the options of its member, and by its pace: a member with slow handlers reads little ahead, so
that the others find something to do.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.shared.store import ClaimedMessage
from mqlayer.domain.message import Record
from mqlayer.domain.routing import NodeId
from mqlayer.groups.pop_partitions import PopPartition
from mqlayer.redis.shared_scripts import SharedGroupPartition

AHEAD_S: Final = 0.5
"""How much work a member reads ahead, by its pace."""
SLICE_S: Final = 0.005
"""How much work a worker takes at a time, by the pace; what is not begun within TURN_S goes to others."""
TIME_SLICE_S: Final = 0.05
SLICE_LIMIT: Final = 500
FRESH: Final = 0.9
"""Nothing is begun that was last kept longer ago than this part of the visibility timeout."""


class FetchedBatch:
    """Records of one partition that one call gave. Stands for the partition towards handlers' contexts.

    `group_partition`: None for what was given back from Postgres. `epoch`: for the fence, one for all partitions of a
    group.
    `suspect`: it may have ended its former member's process.
    """

    __slots__ = (
        "assignment",
        "attempts",
        "claim",
        "dropped",
        "ended",
        "epoch",
        "extended_at",
        "group_partition",
        "hung",
        "lost",
        "partition",
        "read_at",
        "records",
        "size",
        "suspect",
    )  # fmt: skip
    ordered: Final = False

    def __init__(
        self,
        one: PopPartition,
        group_partition: SharedGroupPartition | None,
        epoch: int,
        records: Sequence[Record],
        now: float,
    ) -> None:
        self.assignment, self.group_partition, self.epoch, self.records = one, group_partition, epoch, records
        self.partition = one.partition
        self.read_at = self.extended_at = now
        self.attempts: dict[int, int] = {}
        # Offsets that are settled or given back, and those that others have.
        self.ended: set[int] = set()
        self.lost: set[int] = set()
        # Those that were not kept when the others were: their handlers run for too long.
        self.hung: set[int] = set()
        self.size = sum([len(record[3]) for record in records])
        self.suspect = self.dropped = False
        # Of a message that was given back from Postgres.
        self.claim: ClaimedMessage | None = None

    @property
    def open(self) -> list[int]:
        """The offsets that are neither settled nor given back, nor others'."""
        ended, lost = self.ended, self.lost
        return [record.offset for record in self.records if record.offset not in ended and record.offset not in lost]


WorkSlice = tuple[FetchedBatch, Sequence[Record]]
"""Records of a batch that are to be handled one after the other."""


class WorkerSlot:
    """What one worker is at. `work`: batch, records that it has not begun, offsets it has handled since it said so.

    Each record is taken out of the line by whoever gets it: the worker, or others where a handler takes long.
    """

    __slots__ = ("offset", "since", "work")

    def __init__(self) -> None:
        self.work: tuple[FetchedBatch, deque[Record], deque[int]] | None = None
        self.offset, self.since = 0, 0.0

    def begin(self, batch: FetchedBatch, records: Sequence[Record], now: float) -> tuple[deque[Record], deque[int]]:
        """Begin with some records; return their line, and where to note those that are handled."""
        todo: deque[Record] = deque(records)
        done: deque[int] = deque()
        self.since = now
        self.work = (batch, todo, done)
        return todo, done


def drain(queue: deque[Any]) -> list[Any]:
    """Take out what is in a line, though others may do so too."""
    found: list[Any] = []
    with contextlib.suppress(IndexError):
        while True:
            found.append(queue.popleft())
    return found


class Prefetch:
    """Safe for many threads; every call is short."""

    def __init__(
        self, *, concurrency: int, prefetch_count: int, prefetch_bytes: int, visibility_timeout_s: float
    ) -> None:
        self._concurrency, self._count_limit, self._bytes_limit = concurrency, prefetch_count, prefetch_bytes
        self._visibility_timeout_s = visibility_timeout_s
        self._changed = threading.Condition()
        self._ready: deque[WorkSlice] = deque()
        # Suspects: those that nobody has begun with care so far go beside each other, the others alone.
        self._suspects: dict[Literal["new", "blamed"], deque[FetchedBatch]] = {"new": deque(), "blamed": deque()}
        self._guarded, self._alone = 0, False
        self._batches: dict[int, FetchedBatch] = {}
        self._worker_slots: list[WorkerSlot] = []
        self._pace_s = 0.01
        self._unreachable: set[NodeId] = set()
        self.count = self.bytes = 0
        self.stopping = False
        self.on_ready: Callable[[], None] | None = None

    # -- reading -------------------------------------------------------------------------------------------------------

    def capacity(self) -> int:
        """Return how many more records may be read."""
        count, size = self.count, self.bytes
        if self._unreachable:
            stuck = [batch for batch in self.batches() if batch.assignment.node in self._unreachable]
            count -= sum(len(batch.records) - len(batch.ended) for batch in stuck)
            size -= sum(batch.size for batch in stuck)
        if size >= self._bytes_limit:
            return 0
        ahead = int(self._concurrency * AHEAD_S / self._pace_s)
        return min(self._count_limit, max(2 * self._concurrency, ahead)) - count

    def note_node(self, node_id: NodeId, *, unreachable: bool) -> None:
        """Note whether a node answers: what is stuck of one that does not must not keep others from being read."""
        if unreachable != (node_id in self._unreachable):
            self._unreachable = self._unreachable | {node_id} if unreachable else self._unreachable - {node_id}

    def add(self, batch: FetchedBatch) -> None:
        """Count a batch that nobody is to handle as yet."""
        with self._changed:
            self._batches[id(batch)] = batch
            self.count += len(batch.records)
            self.bytes += batch.size

    def put(self, batch: FetchedBatch) -> None:
        """Have a batch handled."""
        with self._changed:
            if batch.suspect:
                self._suspects["blamed" if batch.attempts.get(batch.records[0].offset) else "new"].append(batch)
            else:
                self._ready.append((batch, batch.records))
            self._changed.notify_all()
        if self.on_ready is not None:
            self.on_ready()

    # -- handling ------------------------------------------------------------------------------------------------------

    def new_worker_slot(self) -> WorkerSlot:
        """Return what a worker says in what it is at."""
        worker_slot = WorkerSlot()
        self._worker_slots.append(worker_slot)
        return worker_slot

    def next_slice(self, timeout_s: float) -> WorkSlice | None:
        """Return what to handle next, None where nothing came in time or it is stopping."""
        with self._changed:
            found = self._next()
            if found is None and timeout_s:
                self._changed.wait(timeout_s)
                found = self._next()
            return found

    def _next(self) -> WorkSlice | None:
        if self.stopping:
            return None
        suspect = self._next_suspect()
        if suspect is not None:
            return suspect, suspect.records
        count = max(1, min(SLICE_LIMIT, int(SLICE_S / self._pace_s)))
        limit, now = self._visibility_timeout_s * FRESH, clock()
        for _ in range(len(self._ready)):
            batch, records = self._ready.popleft()
            if batch.dropped:
                continue
            if now - batch.extended_at > limit:
                # Until its node says that it is still ours.
                self._ready.append((batch, records))
                continue
            if len(records) > count:
                self._ready.appendleft((batch, records[count:]))
                records = records[:count]
            return batch, records
        return None

    def _next_suspect(self) -> FetchedBatch | None:
        if self._alone:
            return None
        if self._suspects["new"]:
            self._guarded += 1
            return self._suspects["new"].popleft()
        if self._suspects["blamed"] and not self._guarded:
            self._guarded, self._alone = 1, True
            return self._suspects["blamed"].popleft()
        return None

    def take_unstarted(self, of: Callable[[FetchedBatch], bool]) -> list[tuple[FetchedBatch, list[int]]]:
        """Take out what no worker has begun, so that none does, and return it: batches and offsets."""
        with self._changed:
            slices = [
                *self._ready,
                *((batch, batch.records) for connection in self._suspects.values() for batch in connection),
            ]
            found = [(batch, records) for batch, records in slices if of(batch)]
            if found:
                ready = [one for one in self._ready if not of(one[0])]
                self._ready.clear()
                self._ready.extend(ready)
                self._keep_suspects(lambda batch: not of(batch))
        open_of = [(batch, set(batch.open), records) for batch, records in found if not batch.dropped]
        return [(batch, [r.offset for r in records if r.offset in left]) for batch, left, records in open_of]

    def _keep_suspects(self, wanted: Callable[[FetchedBatch], bool]) -> None:
        for waiting in self._suspects.values():
            left = [batch for batch in waiting if wanted(batch)]
            waiting.clear()
            waiting.extend(left)

    def return_slice(self, batch: FetchedBatch, records: Sequence[Record]) -> None:
        """Take back what a worker did not begin, and let others have it; of a suspect, that it ended."""
        with self._changed:
            if batch.suspect:
                self._guarded -= 1
                self._alone = False
            if records:
                self._ready.appendleft((batch, records))
            if records or batch.suspect:
                self._changed.notify_all()
        if records and self.on_ready is not None:
            self.on_ready()

    def reclaim_slow(self) -> list[tuple[FetchedBatch, list[int]]]:
        """Take from workers whose handlers take long what they have not begun, for others; return what they handled."""
        now, found = clock(), []
        for worker_slot in self._worker_slots:
            work = worker_slot.work
            # A suspect is its worker's alone, which says when it has ended.
            if work is None or work[0].suspect or now - worker_slot.since < TIME_SLICE_S:
                continue
            batch, todo, done = work
            rest = drain(todo)
            if rest:
                with self._changed:
                    self._ready.appendleft((batch, rest))
                    self._changed.notify_all()
                if self.on_ready is not None:
                    self.on_ready()
            handled = drain(done)
            if handled:
                found.append((batch, handled))
        return found

    def note_pace(self, count: int, seconds: float) -> None:
        """Learn how long messages take."""
        if count:
            self._pace_s = max(1e-7, 0.7 * self._pace_s + 0.3 * seconds / count)

    # -- ending --------------------------------------------------------------------------------------------------------

    def end(self, batch: FetchedBatch, offsets: Iterable[int]) -> None:
        """Make room for what is settled or given back."""
        with self._changed:
            if id(batch) not in self._batches:
                return
            before = len(batch.ended)
            batch.ended.update(offsets)
            self.count -= len(batch.ended) - before
            if len(batch.ended) >= len(batch.records):
                self._forget(batch)

    def drop(self, doomed: Callable[[FetchedBatch], bool]) -> None:
        """Forget batches that are not ours any more: what of them is under way can't be settled."""
        with self._changed:
            for batch in [batch for batch in self._batches.values() if doomed(batch)]:
                batch.dropped = True
                self.count -= len(batch.records) - len(batch.ended)
                self._forget(batch)
            self._keep_suspects(lambda batch: not batch.dropped)

    def status_of(self, batch: FetchedBatch, offset: int) -> Literal["ours", "unsure", "gone"]:
        """Say whether a message is ours still, as far as its node has told; `unsure`: it is to be asked first."""
        if batch.dropped or offset in batch.lost:
            return "gone"
        late = clock() - batch.extended_at > self._visibility_timeout_s * FRESH
        return "unsure" if late or offset in batch.hung else "ours"

    def _forget(self, batch: FetchedBatch) -> None:
        del self._batches[id(batch)]
        self.bytes -= batch.size

    def batches(self) -> list[FetchedBatch]:
        """Return what is in hand."""
        with self._changed:
            return list(self._batches.values())

    def hung(self, limit_s: float) -> set[tuple[int, int]]:
        """Return batches (by their ids) and offsets whose handlers have run for longer than that."""
        now = clock()
        found = [(worker_slot.work, worker_slot.offset, worker_slot.since) for worker_slot in self._worker_slots]
        return {(id(work[0]), offset) for work, offset, since in found if work and now - since > limit_s}

    def running(self) -> set[tuple[int, int]]:
        """Return the same of all that is being handled."""
        return self.hung(-1.0)

    def stop(self) -> None:
        """Hand nothing out any more."""
        with self._changed:
            self.stopping = True
            self._changed.notify_all()
        if self.on_ready is not None:
            self.on_ready()
