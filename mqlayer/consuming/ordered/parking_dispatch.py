"""The parking worker's side of the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, OwnershipState, resumed_queue
from mqlayer.consuming.ordered.parked_keys import NEVER, OwnedParkedKey
from mqlayer.consuming.ordered.ready_queues import ReadyQueues
from mqlayer.domain.message import Identity, ParkedRecord
from mqlayer.parking import DeadLetterEntry, ParkedState
from mqlayer.redis.partition_scripts import LockTaken


@dataclass(slots=True)
class ParkingTasks:
    """Work of one partition for the parking worker."""

    queues: list[KeyQueue] = field(default_factory=list)
    dead_letters: list[tuple[KeyQueue, Sequence[DeadLetterEntry]]] = field(default_factory=list)
    returned: list[KeyQueue] = field(default_factory=list)
    due: list[OwnedParkedKey] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.queues or self.dead_letters or self.returned or self.due)


class ParkingDispatch:
    """Gives out parking tasks, takes results. Thread-safe."""

    def __init__(self, queues: ReadyQueues) -> None:
        self._queues, self._lock = queues, queues.lock

    def load(
        self, owned: OwnedPartition, loaded: ParkedState, parked_keys: list[OwnedParkedKey], taken: LockTaken
    ) -> None:
        """Load parked keys and dead messages before opening."""
        with self._lock:
            for parked_key in parked_keys:
                owned.parked.add(parked_key)
            for ref, offset in loaded.unsettled:
                known = owned.parked.by_name.get(ref.name)
                if known is not None and offset < taken.next_offset and not taken.has_settled(offset):
                    owned.parked.await_settling(known, offset)
            owned.excluded.add_dead(loaded.dead)

    def add_dead(self, owned: OwnedPartition, dead: set[Identity]) -> None:
        """Make an open partition skip these messages."""
        with self._lock:
            owned.excluded.add_dead(dead)

    def sync(self, owned: OwnedPartition, parked_keys: list[OwnedParkedKey], named: set[bytes] | None = None) -> None:
        """Apply others' changes to parked keys, with `named` only to those; started keys continue."""
        with self._lock:
            if owned.state is not OwnershipState.OPEN:
                return
            found = {parked_key.ref.name: parked_key for parked_key in parked_keys}
            by_name = owned.parked.by_name
            for known in list(by_name.values()) if named is None else [by_name[n] for n in named if n in by_name]:
                there = found.pop(known.ref.name, None)
                if known.entry is not None or known.queue is not None:
                    continue
                if there is None:
                    self._unpark(owned, known)
                else:
                    owned.parked.follow(known, there)
            for parked_key in found.values():
                self._park_queue(owned, parked_key)

    def take_tasks(self, owned: OwnedPartition, limits: tuple[int, int, int]) -> ParkingTasks:
        """Take parking tasks up to limits of messages, bytes, starts."""
        with self._lock:
            self._queues.collect_finished()
            tasks = ParkingTasks()
            if owned.state is OwnershipState.GONE:
                return tasks
            tasks.returned = self._queues.take_returned(owned)
            if owned.state is OwnershipState.OPEN:
                count, size, starts = limits
                if not owned.finished and self._queues.lease.holds():
                    tasks.due = self._take_due(owned, max(0, starts))
                tasks.queues = owned.to_park.take(count, size)
                owned.began(len(tasks.queues))
            tasks.dead_letters = owned.to_park.take_dead_letters()
            return tasks

    def _take_due(self, owned: OwnedPartition, starts: int) -> list[OwnedParkedKey]:
        due = [p for p in owned.parked.due_now(clock()) if self._may_start(owned, p)][:starts]
        owned.parked.take_due(due)
        # Counted as running already: a successor's owner would start them too once this is drained.
        owned.began(len(due))
        return due

    def not_written(self, owned: OwnedPartition, tasks: ParkingTasks) -> None:
        """Take back tasks after a failed transaction."""
        with self._lock:
            self._queues.put_back_returned(tasks.returned)
            owned.to_park.put_back_dead_letters(tasks.dead_letters)
            for parked_key in tasks.due:
                owned.parked.schedule(parked_key, parked_key.due)
                self._queues.end_resumed(owned)
            for key_queue in reversed(tasks.queues):
                owned.to_park.not_written(key_queue)
                self._queues.finish(key_queue, 0.0)
            if owned.state is OwnershipState.GONE:
                self._queues.drop_parking(owned)

    def batch_parked(self, owned: OwnedPartition, key_queue: KeyQueue, *, parked: bool) -> None:
        """Take back a parked, or meanwhile unparked, key queue."""
        with self._lock:
            parked_key = key_queue.parked_key
            if parked and parked_key is not None:
                parked_key.written()
                owned.results.settle(key_queue.batch)
                self._queues.finish(key_queue, 0.0)
                return
            key_queue.put_back(key_queue.batch)
            if owned.state is OwnershipState.GONE or parked_key is None:
                self._queues.finish(key_queue, 0.0)
            elif parked_key.queue is None:
                owned.parked.remove(parked_key)
                key_queue.parked_key = None
                owned.skip_dead(key_queue)
                self._queues.finish(key_queue, 0.0)
            else:
                # An operator unparked the key while a handler has a message of it: wait for that.
                key_queue.batch = ()
                self._queues.end_resumed(owned)

    def batch_refused(
        self, owned: OwnedPartition, key_queue: KeyQueue, refused: set[Identity], *, parked: bool, retry_s: float
    ) -> None:
        """Take back a key queue; its `refused` messages wait in the stream for room.

        `parked`: the rest is parked; else its head is retried in place.
        """
        with self._lock:
            parked_key = key_queue.parked_key
            if parked_key is not None and parked:
                parked_key.written()
            elif parked_key is not None:
                owned.parked.remove(parked_key)
                key_queue.parked_key = None
            key_queue.put_back([record for record in key_queue.batch if record.identity in refused])
            # Not counted as handled: these are parked, and the parking worker reports them.
            owned.results.settle(record for record in key_queue.batch if record.identity not in refused)
            owned.take_back(key_queue)
            if owned.state is not OwnershipState.OPEN:
                self._queues.end(key_queue)
            else:
                self._queues.delay(key_queue, retry_s)

    def dead_lettered(self, key_queue: KeyQueue) -> None:
        """Take back a key queue whose first messages left the group."""
        with self._lock:
            key_queue.owned.results.settle(key_queue.batch)
            self._queues.finish(key_queue, 0.0)

    def resume(self, owned: OwnedPartition, parked_key: OwnedParkedKey, records: list[ParkedRecord]) -> None:
        """Give a parked key's messages to workers; without any, unpark it."""
        with self._lock:
            parked_key.ended()
            if not records:
                self._queues.end_resumed(owned)
                self._unpark(owned, parked_key)
                return
            key_queue = resumed_queue(owned, parked_key, records)
            if owned.state is OwnershipState.OPEN:
                self._queues.enqueue([key_queue])
            elif owned.state is OwnershipState.DRAINING:
                self._queues.finish(key_queue, 0.0)

    def reschedule(self, owned: OwnedPartition, parked_key: OwnedParkedKey, attempts: int, due: float) -> None:
        """Let a parked key wait again."""
        with self._lock:
            parked_key.wait(attempts)
            owned.parked.schedule(parked_key, due)
            self._queues.end_resumed(owned)
            key_queue = owned.queues.get(parked_key.ref.name)
            if key_queue is not None and key_queue.records and not key_queue.batch and key_queue not in owned.to_park:
                owned.to_park.add(key_queue)

    def next_due_s(self, partitions: list[OwnedPartition]) -> float:
        """Return seconds until a parked key may start."""
        with self._lock:
            if not self._queues.lease.holds():
                return NEVER
            starting = [owned for owned in partitions if owned.state is OwnershipState.OPEN and not owned.finished]
            due = min((owned.parked.next_due() for owned in starting), default=NEVER)
        return max(0.0, due - clock())

    def _may_start(self, owned: OwnedPartition, parked_key: OwnedParkedKey) -> bool:
        if parked_key.entry is not None or parked_key.queue is not None or parked_key.unsettled:
            return False
        key_queue = owned.queues.get(parked_key.ref.name)
        return key_queue is None or not key_queue.batch

    def _unpark(self, owned: OwnedPartition, parked_key: OwnedParkedKey) -> None:
        owned.parked.remove(parked_key)
        key_queue = owned.queues.get(parked_key.ref.name)
        if key_queue is not None and key_queue.parked_key is parked_key:
            key_queue.parked_key, key_queue.uncertain = None, 0
            if key_queue.records and not key_queue.batch:
                owned.to_park.discard(key_queue)
                owned.skip_dead(key_queue)
                if key_queue.records:
                    self._queues.enqueue([key_queue])
                else:
                    owned.spilled.continue_or_end(key_queue)

    def _park_queue(self, owned: OwnedPartition, parked_key: OwnedParkedKey) -> None:
        owned.parked.add(parked_key)
        key_queue = owned.queues.get(parked_key.ref.name)
        if key_queue is not None:
            key_queue.parked_key = parked_key
            if self._queues.take_waiting(key_queue):
                self._queues.park(key_queue)
