"""Form batches: the first messages of several keys, or several of one key.

A key queue is in one batch at most, so keys stay in order. Failed, suspect, and failed batches' messages come alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from mqlayer.consuming.api.batches import BatchOf
from mqlayer.consuming.engine.circuit_breaker import CircuitBreaker
from mqlayer.consuming.engine.clock import Lease, clock
from mqlayer.consuming.engine.fair_queue import FairQueue
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, OwnershipState
from mqlayer.consuming.ordered.ready_queues import ReadyQueues, admitted, end_turn
from mqlayer.consuming.ordered.results import size_of
from mqlayer.consuming.ordered.workers import TIME_SLICE_S
from mqlayer.domain.message import NO_KEY, ParkedRecord, Record, extra_size

SHORTEST_WAIT_S = 0.001


class BatchQueues(ReadyQueues):
    """Ready key queues that are given out in batches."""

    def __init__(self, lease: Lease, batch_of: BatchOf, breaker: CircuitBreaker | None = None) -> None:
        super().__init__(lease, breaker)
        self._of = batch_of

    def gather(self) -> list[KeyQueue]:
        """Return a due batch's key queues, or none."""
        self.collect_finished()
        if self.stopping or not self.lease.holds():
            return []
        if self.breaker.engaged:
            return admitted(self)
        key_queues = self._of_one_key() if self._of.kind == "key" else self._of_distinct_keys()
        for key_queue in key_queues:
            key_queue.owned.begin(key_queue, self._most(key_queue) if self._of.kind == "key" else 1)
        return key_queues

    def batch_due_s(self, timeout_s: float) -> float:
        """Return seconds until a batch is due."""
        if not self.ready or not self._of.linger_s or not self.lease.holds():
            return timeout_s
        due_s = oldest(self.ready).since + self._of.linger_s - clock()
        return max(SHORTEST_WAIT_S, min(timeout_s, due_s))

    def enqueue(self, key_queues: Iterable[KeyQueue]) -> None:
        """Make key queues ready, from now on."""
        now, key_queues = clock(), list(key_queues)
        for key_queue in key_queues:
            key_queue.since = now
        super().enqueue(key_queues)

    def finish(self, key_queue: KeyQueue, delay_s: float) -> None:
        """Take back a key queue with its remaining records."""
        key_queue.since = clock()
        owned = key_queue.owned
        goes_on = key_queue.resumed and key_queue.records and key_queue.action is None and self._in_turn(key_queue)
        if goes_on and owned.state is OwnershipState.OPEN and not owned.finished:
            # Postgres delivered more than one batch: the parking worker hears later.
            end_turn(self.ready, key_queue)
            key_queue.batch = ()
            self.ready.append(key_queue)
        else:
            super().finish(key_queue, delay_s)

    def _in_turn(self, key_queue: KeyQueue) -> bool:
        """Whether a parked key continues; always after a failed batch."""
        return (
            key_queue.parked_key is None
            or key_queue.singly > 0
            or clock() < key_queue.parked_key.resumed_at + TIME_SLICE_S
        )

    def _of_distinct_keys(self) -> list[KeyQueue]:
        ready, key_queues, size, full = self.ready, list[KeyQueue](), 0, False
        while ready and not full:
            key_queue = ready.popleft()
            if key_queue.owned.state is not OwnershipState.OPEN:
                continue
            record = key_queue.records[0]
            alone, size = is_alone(key_queue, record), size + size_of(record) + extra_size(record)
            if key_queues and (alone or size > self._of.limit_bytes):
                ready.appendleft(key_queue)
                break
            key_queues.append(key_queue)
            full = alone or len(key_queues) == self._of.limit
        else:
            if (
                key_queues
                and not full
                and self._may_linger(key_queues[0])
                and not any(key_queue.owned.room.full for key_queue in key_queues)
            ):
                ready.extendleft(reversed(key_queues))
                return []
        return key_queues

    def _of_one_key(self) -> list[KeyQueue]:
        ready = self.ready
        if isinstance(ready, FairQueue):
            found = ready.take_first(self._is_due)
        else:
            found = next(filter(self._is_due, ready), None)
            if found is not None:
                ready.remove(found)
        return [] if found is None else [found]

    def _is_due(self, key_queue: KeyQueue) -> bool:
        opened = key_queue.owned.state is OwnershipState.OPEN
        return opened and (self._is_full(key_queue) or not self._may_linger(key_queue))

    def _may_linger(self, key_queue: KeyQueue) -> bool:
        # A partition without room reads nothing that could fill the batch.
        return self._of.linger_s > 0 and not key_queue.owned.room.full and clock() < key_queue.since + self._of.linger_s

    def _is_full(self, key_queue: KeyQueue) -> bool:
        if len(key_queue.records) >= self._of.limit or key_queue.spilled is not None or key_queue.resumed:
            return True
        # A message without a key has its own key queue.
        return (
            key_queue.key.startswith(NO_KEY)
            or self._count(key_queue) < len(key_queue.records)
            or is_alone(key_queue, key_queue.records[0])
        )

    def _most(self, key_queue: KeyQueue) -> int:
        count, turn = self._count(key_queue), key_queue.class_turn
        return turn.most(count, self.ready.limits) if turn is not None and isinstance(self.ready, FairQueue) else count

    def _count(self, key_queue: KeyQueue) -> int:
        if is_alone(key_queue, key_queue.records[0]):
            return 1
        size = 0
        for count, record in enumerate(key_queue.records[: self._of.limit]):
            size += size_of(record) + extra_size(record)
            if count and (size > self._of.limit_bytes or is_alone(key_queue, record)):
                return count
        return min(len(key_queue.records), self._of.limit)


class BatchDispatcher(Dispatcher):
    """A dispatcher whose workers take batches."""

    def __init__(self, lease: Lease, batch_of: BatchOf, breaker: CircuitBreaker | None = None) -> None:
        self._batches = BatchQueues(lease, batch_of, breaker)
        super().__init__(lease, self._batches)

    def take_batch(self, timeout_s: float) -> list[KeyQueue]:
        """Return key queues with their records; empty at the timeout."""
        with self.lock:
            key_queues = self._batches.gather()
            if not key_queues and timeout_s and not self._batches.stopping:
                self._batches.wait(self._batches.batch_due_s(timeout_s))
                key_queues = self._batches.gather()
            return key_queues

    def shorten(self, key_queue: KeyQueue, count: int) -> None:
        """Leave a worker the first messages of its part."""
        with self.lock:
            key_queue.put_back(key_queue.batch[count:])
            key_queue.batch = key_queue.batch[:count]

    def note_full(self, owned: OwnedPartition, *, full: bool) -> None:
        """Note whether a partition lacks room; then batches don't wait."""
        if owned.room.full != full:
            with self.lock:
                owned.room.note_full(full=full)
                if full:
                    self._batches.wake()

    def batch_due_s(self, timeout_s: float) -> float:
        """Return seconds until a batch is due."""
        with self.lock:
            return self._batches.batch_due_s(timeout_s)


def oldest(ready: deque[KeyQueue] | FairQueue[KeyQueue]) -> KeyQueue:
    """Return the key queue that has waited longest."""
    return min(ready.heads(), key=lambda head: head.since) if isinstance(ready, FairQueue) else ready[0]


def is_alone(key_queue: KeyQueue, record: Record) -> bool:
    """Whether a message needs its own batch."""
    if record.offset < key_queue.guarded_below or record.offset < key_queue.singly:
        return True
    if isinstance(record, ParkedRecord):
        return record.attempts > 0 or (key_queue.parked_key is not None and key_queue.parked_key.guarded_count > 0)
    return key_queue.owned.attempts.get(record.offset) > 0
