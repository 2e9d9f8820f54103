"""Give key queues to workers: keys in parallel, each strictly in order.

With quick handlers, a worker takes several at once. Idle workers steal half of a busy one's local queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from mqlayer.consuming.engine.clock import Lease
from mqlayer.consuming.ordered.admission import Admission
from mqlayer.consuming.ordered.class_turns import ClassTurns
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, OwnershipState
from mqlayer.consuming.ordered.parked_keys import OwnedParkedKey
from mqlayer.consuming.ordered.parking_dispatch import ParkingDispatch
from mqlayer.consuming.ordered.ready_queues import ReadyQueues, is_quick
from mqlayer.domain.message import Record
from mqlayer.domain.offsets import OffsetRange
from mqlayer.domain.routing import PartitionId
from mqlayer.parking import DeadLetterEntry
from mqlayer.redis.partition_scripts import LockTaken

STEAL_AFTER_S: Final = 0.05
"""Wait before stealing."""


class Dispatcher:
    """What readers, workers and settlers do to one member's key queues. Thread-safe.

    `parking` is what the parking worker does to them, `admission` what the circuit breaker does,
    `classes` what key classes do.
    """

    def __init__(self, lease: Lease, queues: ReadyQueues | None = None) -> None:
        self.lease = lease
        self._queues = queues or ReadyQueues(lease)
        self.lock, self._changed = self._queues.lock, self._queues.changed
        self.parking = ParkingDispatch(self._queues)
        self.admission = Admission(self._queues)
        self.classes = ClassTurns(self._queues)
        self.done = self._queues.done
        """Takes back a key queue all of whose batch is handled."""
        self.note_pace, self.is_quick = self._queues.note_pace, partial(is_quick, self._queues)
        self._watching = 0

    @property
    def stopping(self) -> bool:
        """Whether workers take nothing more."""
        return self._queues.stopping

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when something is ready."""
        self._queues.on_ready = wake

    def on_parking(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when the parking worker has work."""
        self._queues.on_parking = wake

    # -- readers -----------------------------------------------------------------------------------------------------

    def put(
        self,
        owned: OwnedPartition,
        records: list[Record],
        *,
        last: int | None = None,
        unmatched: Sequence[OffsetRange] = (),
    ) -> None:
        """Add read records, in order.

        With a filter: `last` is the last scanned offset, `unmatched` the ranges left out.
        """
        with self.lock:
            self._queues.collect_finished()
            if owned.state is OwnershipState.OPEN:
                if unmatched:
                    owned.add_unmatched(unmatched)
                self._queues.enqueue(owned.add(records, records[-1].offset if last is None else last))
                if owned.to_park:
                    self._queues.on_parking()

    def note_full(self, owned: OwnedPartition, *, full: bool) -> None:
        """Note whether a partition lacks room."""
        owned.room.note_full(full=full)

    def next_due_s(self) -> float:
        """Return seconds until a delay ends, or infinity."""
        with self.lock:
            self._queues.collect_finished()
            return self._queues.next_due_s()

    def queues_to_reload(self, owned: OwnedPartition) -> list[KeyQueue]:
        """Take due spilled key queues."""
        with self.lock:
            self._queues.collect_finished()
            self._queues.release_due()
            return owned.spilled.take_due()

    def reload(self, key_queue: KeyQueue, records: list[Record], asked: int) -> None:
        """Continue a spilled key queue with its first `asked` offsets' records."""
        with self.lock:
            if key_queue.owned.state is not OwnershipState.OPEN:
                return
            key_queue.owned.spilled.reload(key_queue, records, asked)
            if key_queue.records and key_queue.parked_key is None:
                self._queues.enqueue([key_queue])
            elif key_queue.records:
                self._queues.park(key_queue)

    def not_reloaded(self, owned: OwnedPartition, key_queues: list[KeyQueue]) -> None:
        """Take back unloaded key queues."""
        with self.lock:
            owned.spilled.put_back(key_queues)

    # -- workers -----------------------------------------------------------------------------------------------------

    def new_local_queue(self) -> deque[KeyQueue]:
        """Return a worker's local queue."""
        with self.lock:
            return self._queues.new_local_queue()

    def fill(self, local_queue: deque[KeyQueue], timeout_s: float) -> bool:
        """Fill an empty local queue, waiting; say whether it has work."""
        with self.lock:
            queues = self._queues
            if not queues.fill(local_queue) and timeout_s:
                watching = not self._watching and any(queues.local_queues)
                self._watching += watching
                try:
                    called = queues.wait(min(timeout_s, STEAL_AFTER_S) if watching else timeout_s)
                finally:
                    self._watching -= watching
                if not queues.fill(local_queue) and not called and not queues.stopping:
                    self.steal(local_queue)
            return bool(local_queue)

    def steal(self, local_queue: deque[KeyQueue]) -> None:
        """Take half of what another worker has not begun."""
        for other in self._queues.local_queues:
            for _ in range((len(other) + 1) // 2):
                try:
                    local_queue.appendleft(other.pop())
                except IndexError:
                    break
            if local_queue:
                return

    def finish(self, key_queue: KeyQueue, leftover: Sequence[Record], *, delay_s: float = 0.0) -> None:
        """Take a key queue back, unhandled records first."""
        with self.lock:
            if leftover:
                key_queue.put_back(leftover)
            self._queues.finish(key_queue, delay_s)

    def park(self, key_queue: KeyQueue, leftover: list[Record], parked_key: OwnedParkedKey) -> None:
        """Take back a key queue to park."""
        with self.lock:
            key_queue.put_back(leftover)
            if key_queue.owned.state is OwnershipState.OPEN and key_queue.parked_key is None:
                key_queue.parked_key = parked_key
                key_queue.owned.parked.add(parked_key)
            self._queues.finish(key_queue, 0.0)

    def dead_letter(self, key_queue: KeyQueue, leftover: list[Record], dead_letters: Sequence[DeadLetterEntry]) -> None:
        """Take back a key queue whose first messages leave the group."""
        with self.lock:
            key_queue.put_back(leftover[len(dead_letters) :])
            if key_queue.owned.state is not OwnershipState.OPEN:
                self._queues.finish(key_queue, 0.0)
            else:
                key_queue.batch = leftover[: len(dead_letters)]
                key_queue.owned.to_park.add_dead_letters(key_queue, dead_letters)
                self._queues.on_parking()

    # -- settlers ----------------------------------------------------------------------------------------------------

    def settled(
        self, owned: OwnedPartition, records: Sequence[Record], committed: int, unmatched: Sequence[OffsetRange] = ()
    ) -> None:
        """Free settled records' room, and parked keys behind them."""
        with self.lock:
            free = owned.settled(records, committed)
            if unmatched and owned.parked.by_offset:
                free = owned.parked.all_unmatched(unmatched) or free
            if free:
                self._queues.on_parking()

    def is_idle(self, owned: OwnedPartition) -> bool:
        """Whether nothing runs."""
        with self.lock:
            self._queues.collect_finished()
            return owned.running == 0

    def stop_starting(self, owned: OwnedPartition) -> bool:
        """Start nothing more; say whether idle."""
        with self.lock:
            self._queues.collect_finished()
            owned.finish()
            # Retention may settle a message under its handler: the successors must wait for that.
            return owned.running == 0 and not self._queues.runs_on(owned.partition)

    # -- life --------------------------------------------------------------------------------------------------------

    def open(self, owned: OwnedPartition, taken: LockTaken) -> None:
        """Open a new partition."""
        with self.lock:
            owned.open(taken)

    def drain(self, owned: OwnedPartition, until: float) -> None:
        """Start nothing more; running handlers have until `until`."""
        with self.lock:
            self._queues.collect_finished()
            if owned.state is not OwnershipState.GONE:
                owned.drain(until)
                self._queues.drop_waiting(owned)

    def drop(self, owned: OwnedPartition) -> None:
        """Forget a partition; running results are void."""
        with self.lock:
            self._queues.collect_finished()
            if owned.state is not OwnershipState.GONE:
                self._queues.drop(owned)

    def runs_on(self, partition: PartitionId) -> bool:
        """Whether a dropped ownership's handler still runs."""
        with self.lock:
            self._queues.collect_finished()
            return self._queues.runs_on(partition)

    def retry_now(self) -> None:
        """Make delayed key queues due."""
        with self.lock:
            self._queues.retry_now()

    def stop(self) -> None:
        """End all workers."""
        with self.lock:
            self._queues.stop()
        if self._queues.on_ready is not None:
            self._queues.on_ready()
