"""Give key queues to workers: keys in parallel, each strictly in order.

While handlers are quick, a worker takes several at once to share the lock's cost. Idle workers steal half of a busy
one's local queue.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from mqlayer.consuming.engine.clock import Lease, clock
from mqlayer.consuming.engine.failure_actions import DeadLetter
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, OwnershipState, resumed_queue
from mqlayer.consuming.ordered.parked_keys import NEVER, OwnedParkedKey
from mqlayer.domain.message import Identity, ParkedRecord, Record
from mqlayer.domain.offsets import OffsetRange
from mqlayer.domain.routing import PartitionId
from mqlayer.parking import DeadLetterEntry, ParkedState
from mqlayer.redis.partition_scripts import LockTaken

QUICK_S: Final = 0.0002
"""Below this time per message, workers take several key queues."""
CHUNK: Final = 32
WORTH_S: Final = 0.002
"""Ready work that justifies another worker."""
STEAL_AFTER_S: Final = 0.05
"""Wait before stealing."""

QueueKey = tuple[PartitionId, bytes]


@dataclass(slots=True)
class ParkingTasks:
    """Work of one partition for the parking worker."""

    queues: list[KeyQueue] = field(default_factory=list)
    dead_letters: list[tuple[KeyQueue, DeadLetterEntry]] = field(default_factory=list)
    returned: list[KeyQueue] = field(default_factory=list)
    due: list[OwnedParkedKey] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.queues or self.dead_letters or self.returned or self.due)


class Dispatcher:
    """One member's ready, delayed and running key queues. Thread-safe; `lock` guards fields marked (lock)."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.stopping = False
        self.on_ready: Callable[[], None] | None = None
        self.on_parking: Callable[[], None] = _nothing
        # Resumed key queues that workers finished.
        self._returned: deque[KeyQueue] = deque()
        self._ready: deque[KeyQueue] = deque()
        # Finished key queues. Appended without the lock: with one message per key, each message would take it.
        self._done: deque[KeyQueue] = deque()
        self.done: Callable[[KeyQueue], None] = self._done.append
        self._delayed: list[tuple[float, int, KeyQueue]] = []
        self._order = count()
        self._local_queues: list[deque[KeyQueue]] = []
        self._idle = 0
        self._watching = 0
        # Slow until measured: a first slow message must not delay others.
        self._message_s = WORTH_S
        # Keys that still run under a former ownership, and the later key queues that wait for them: a member that owns
        # its partition again must not run a key twice at once.
        self._still_running: Counter[QueueKey] = Counter()
        self._behind_running: dict[QueueKey, KeyQueue] = {}

    def new_local_queue(self) -> deque[KeyQueue]:
        """Return a worker's local queue."""
        local_queue: deque[KeyQueue] = deque()
        with self.lock:
            self._local_queues.append(local_queue)
        return local_queue

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
            self._collect_finished()
            if owned.state is OwnershipState.OPEN:
                if unmatched:
                    owned.add_unmatched(unmatched)
                self._enqueue(owned.add(records, records[-1].offset if last is None else last))
                if owned.to_park:
                    self.on_parking()

    def note_full(self, owned: OwnedPartition, *, full: bool) -> None:
        """Note whether a partition lacks room."""
        owned.full = full

    def fill(self, local_queue: deque[KeyQueue], timeout_s: float) -> bool:
        """Fill an empty local queue, waiting; say whether it has work."""
        with self.changed:
            if not self._fill(local_queue):
                watching = not self._watching and any(self._local_queues)
                self._idle += 1
                self._watching += watching
                try:
                    called = self.changed.wait(min(timeout_s, STEAL_AFTER_S) if watching else timeout_s)
                finally:
                    self._idle -= 1
                    self._watching -= watching
                if not self._fill(local_queue) and not called and not self.stopping:
                    self._steal(local_queue)
            return bool(local_queue)

    def fill_now(self, local_queue: deque[KeyQueue]) -> bool:
        """`fill` without waiting."""
        with self.lock:
            return self._fill(local_queue)

    def next_due_s(self) -> float:
        """Return seconds until a delay ends, or infinity."""
        with self.lock:
            return max(0.0, self._delayed[0][0] - clock()) if self._delayed else float("inf")

    def finish(self, key_queue: KeyQueue, leftover: list[Record], *, delay_s: float = 0.0) -> None:
        """Take a key queue back, unhandled records first."""
        with self.lock:
            if leftover:
                key_queue.records[:0] = leftover
            self._finish(key_queue, delay_s)

    def is_idle(self, owned: OwnedPartition) -> bool:
        """Say whether nothing runs."""
        with self.lock:
            self._collect_finished()
            return owned.running == 0

    def queues_to_reload(self, owned: OwnedPartition) -> list[KeyQueue]:
        """Take due spilled key queues."""
        with self.lock:
            self._collect_finished()
            self._release_due()
            key_queues = list(owned.to_reload)
            owned.to_reload.clear()
            return key_queues

    def reload(self, key_queue: KeyQueue, records: list[Record], asked: int) -> None:
        """Continue a spilled key queue with its first `asked` offsets' records."""
        with self.lock:
            if key_queue.owned.state is OwnershipState.OPEN:
                key_queue.owned.reload(key_queue, records, asked)
                if key_queue.records:
                    self._enqueue_or_park(key_queue)

    def not_reloaded(self, owned: OwnedPartition, key_queues: list[KeyQueue]) -> None:
        """Take back unloaded key queues."""
        with self.lock:
            owned.to_reload.extendleft(reversed(key_queues))

    def note_pace(self, messages: int, seconds: float) -> None:
        """Update the mean handler time."""
        if messages:
            self._message_s += 0.2 * (seconds / messages - self._message_s)

    def open(self, owned: OwnedPartition, taken: LockTaken) -> None:
        """Open a new partition."""
        with self.lock:
            if owned.state is OwnershipState.NEW:
                owned.start_at(taken)

    def drain(self, owned: OwnedPartition, until: float) -> None:
        """Start nothing more; running handlers have until `until`."""
        with self.lock:
            self._collect_finished()
            if owned.state is not OwnershipState.GONE:
                owned.drain_until = until
                owned.state = OwnershipState.DRAINING
                self._drop_waiting(owned)

    def drop(self, owned: OwnedPartition) -> None:
        """Forget a partition; running results are void."""
        with self.lock:
            self._collect_finished()
            if owned.state is not OwnershipState.GONE:
                owned.state = OwnershipState.GONE
                self._drop_waiting(owned)
                key_queues = [*owned.queues.values(), *owned.parked.queues()]
                self._still_running.update(
                    (owned.partition, key_queue.key) for key_queue in key_queues if key_queue.batch
                )
                self._drop_parking_tasks(owned)

    def runs_on(self, partition: PartitionId) -> bool:
        """Say whether a dropped ownership's handler still runs."""
        with self.lock:
            self._collect_finished()
            return any(queue_key[0] == partition for queue_key in self._still_running)

    def settled(self, owned: OwnedPartition, records: list[Record]) -> None:
        """Free settled records' room."""
        with self.lock:
            owned.release(records)
            if owned.parked.by_offset and owned.parked.all_settled(records):
                self.on_parking()

    def unmatched_settled(self, owned: OwnedPartition, unmatched: Sequence[OffsetRange]) -> None:
        """Note settled filtered ranges."""
        with self.lock:
            if owned.parked.by_offset and owned.parked.all_unmatched(unmatched):
                self.on_parking()

    # -- parked keys: failures of workers, and the parking worker ------------------------------------------------------

    def park(self, key_queue: KeyQueue, leftover: list[Record], parked_key: OwnedParkedKey) -> None:
        """Take back a key queue to park."""
        with self.lock:
            key_queue.records[:0] = leftover
            if key_queue.owned.state is OwnershipState.OPEN and key_queue.parked_key is None:
                key_queue.parked_key = parked_key
                key_queue.owned.parked.add(parked_key)
            self._finish(key_queue, 0.0)

    def dead_letter(self, key_queue: KeyQueue, leftover: list[Record], dead_letter: DeadLetterEntry) -> None:
        """Take back a key queue whose head leaves the group."""
        with self.lock:
            key_queue.records[:0] = leftover[1:]
            if key_queue.owned.state is not OwnershipState.OPEN:
                self._finish(key_queue, 0.0)
            else:
                key_queue.batch = leftover[:1]
                key_queue.owned.to_dead_letter.append((key_queue, dead_letter))
                self.on_parking()

    def load_parked(
        self, owned: OwnedPartition, loaded: ParkedState, parked_keys: list[OwnedParkedKey], taken: LockTaken
    ) -> None:
        """Load parked keys and dead messages before opening."""
        with self.lock:
            for parked_key in parked_keys:
                owned.parked.add(parked_key)
            for ref, offset in loaded.unsettled:
                known = owned.parked.by_name.get(ref.name)
                if known is not None and offset < taken.next_offset and not taken.has_settled(offset):
                    owned.parked.await_settling(known, offset)
            owned.dead = loaded.dead

    def add_dead(self, owned: OwnedPartition, dead: set[Identity]) -> None:
        """Make an open partition skip these messages."""
        with self.lock:
            owned.dead |= dead

    def sync_parked(
        self, owned: OwnedPartition, parked_keys: list[OwnedParkedKey], named: set[bytes] | None = None
    ) -> None:
        """Apply others' changes to parked keys, with `named` only to those; started keys continue."""
        with self.lock:
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
                    known.attempts = there.attempts
                    owned.parked.schedule(known, there.due)
            for parked_key in found.values():
                self._park_queue(owned, parked_key)

    def take_parking_tasks(self, owned: OwnedPartition, limits: tuple[int, int, int]) -> ParkingTasks:
        """Take parking tasks up to limits of messages, bytes, starts."""
        with self.lock:
            self._collect_finished()
            tasks = ParkingTasks()
            if owned.state is OwnershipState.GONE:
                return tasks
            tasks.returned = [key_queue for key_queue in self._returned if key_queue.owned is owned]
            self._returned = deque(key_queue for key_queue in self._returned if key_queue.owned is not owned)
            if owned.state is OwnershipState.OPEN:
                count, size, starts = limits
                if not owned.finished and self.lease.holds():
                    tasks.due = [p for p in owned.parked.due_now(clock()) if self._may_start(owned, p)][
                        : max(0, starts)
                    ]
                    owned.parked.take_due(tasks.due)
                    # Counted as running already: a successor's owner would start them too once this is drained.
                    owned.running += len(tasks.due)
                if owned.uncertain:
                    # Possibly parked messages first: their key must not continue from Postgres before that is known.
                    owned.to_park = deque(sorted(owned.to_park, key=lambda key_queue: not key_queue.uncertain))
                while owned.to_park and (owned.to_park[0].uncertain or (count > 0 and size > 0)):
                    key_queue = owned.to_park.popleft()
                    taken, key_queue.uncertain = key_queue.uncertain or count, 0
                    key_queue.batch, key_queue.records = key_queue.records[:taken], key_queue.records[taken:]
                    owned.running += 1
                    tasks.queues.append(key_queue)
                    count -= len(key_queue.batch)
                    size -= sum(len(record.body) for record in key_queue.batch)
            tasks.dead_letters = list(owned.to_dead_letter)
            owned.to_dead_letter.clear()
            return tasks

    def not_written(self, owned: OwnedPartition, tasks: ParkingTasks) -> None:
        """Take back tasks after a failed transaction."""
        with self.lock:
            self._returned.extendleft(reversed(tasks.returned))
            owned.to_dead_letter.extendleft(reversed(tasks.dead_letters))
            for parked_key in tasks.due:
                owned.parked.schedule(parked_key, parked_key.due)
                self._end_resumed(owned)
            for key_queue in reversed(tasks.queues):
                key_queue.records[:0] = key_queue.batch
                key_queue.uncertain = len(key_queue.batch)
                owned.uncertain = True
                self._finish(key_queue, 0.0)
            if owned.state is OwnershipState.GONE:
                self._drop_parking_tasks(owned)

    def batch_parked(self, owned: OwnedPartition, key_queue: KeyQueue, *, parked: bool) -> None:
        """Take back a parked, or meanwhile unparked, key queue."""
        with self.lock:
            parked_key = key_queue.parked_key
            if parked and parked_key is not None:
                parked_key.entry = None
                owned.to_settle.extend(key_queue.batch)
                self._finish(key_queue, 0.0)
                return
            key_queue.records[:0] = key_queue.batch
            if owned.state is OwnershipState.GONE or parked_key is None:
                self._finish(key_queue, 0.0)
            elif parked_key.queue is None:
                owned.parked.remove(parked_key)
                key_queue.parked_key = None
                owned.skip_dead(key_queue)
                self._finish(key_queue, 0.0)
            else:
                # An operator unparked the key while a handler has a message of it: wait for that.
                key_queue.batch = ()
                self._end_resumed(owned)

    def batch_refused(
        self, owned: OwnedPartition, key_queue: KeyQueue, refused: set[Identity], *, parked: bool, retry_s: float
    ) -> None:
        """Take back a key queue; its `refused` messages wait in the stream for room.

        `parked`: the rest is parked; else its head is retried in place.
        """
        with self.lock:
            parked_key = key_queue.parked_key
            if parked_key is not None and parked:
                parked_key.entry = None
            elif parked_key is not None:
                owned.parked.remove(parked_key)
                key_queue.parked_key = None
            key_queue.records[:0] = [record for record in key_queue.batch if record.identity in refused]
            # Not counted as handled: these are parked, and the parking worker reports them.
            owned.to_settle.extend(record for record in key_queue.batch if record.identity not in refused)
            key_queue.batch = ()
            owned.running -= 1
            if owned.state is not OwnershipState.OPEN:
                self._end(key_queue)
            else:
                self._delay(key_queue, retry_s)

    def dead_lettered(self, key_queue: KeyQueue) -> None:
        """Take back a key queue whose head left the group."""
        with self.lock:
            key_queue.owned.to_settle.extend(key_queue.batch)
            self._finish(key_queue, 0.0)

    def resume(self, owned: OwnedPartition, parked_key: OwnedParkedKey, records: list[ParkedRecord]) -> None:
        """Give a parked key's messages to workers; without any, unpark it."""
        with self.lock:
            if parked_key.queue is not None:
                ended = len(parked_key.queue.handled) + isinstance(parked_key.queue.action, DeadLetter)
                parked_key.guarded_count = max(0, parked_key.guarded_count - ended)
            parked_key.queue = None
            if not records:
                self._end_resumed(owned)
                self._unpark(owned, parked_key)
                return
            parked_key.attempts = records[0].attempts
            key_queue = resumed_queue(owned, parked_key, records)
            if owned.state is OwnershipState.OPEN:
                self._enqueue([key_queue])
            elif owned.state is OwnershipState.DRAINING:
                self._finish(key_queue, 0.0)

    def reschedule(self, owned: OwnedPartition, parked_key: OwnedParkedKey, attempts: int, due: float) -> None:
        """Let a parked key wait again."""
        with self.lock:
            parked_key.queue, parked_key.attempts, parked_key.died = None, attempts, False
            owned.parked.schedule(parked_key, due)
            self._end_resumed(owned)
            key_queue = owned.queues.get(parked_key.ref.name)
            if key_queue is not None and key_queue.records and not key_queue.batch and key_queue not in owned.to_park:
                owned.to_park.append(key_queue)

    def stop_starting(self, owned: OwnedPartition) -> bool:
        """Start nothing more; say whether idle."""
        with self.lock:
            self._collect_finished()
            owned.finished = True
            return owned.running == 0

    def next_parked_due_s(self, partitions: list[OwnedPartition]) -> float:
        """Return seconds until a parked key may start."""
        with self.lock:
            if not self.lease.holds():
                return NEVER
            starting = [owned for owned in partitions if owned.state is OwnershipState.OPEN and not owned.finished]
            due = min((owned.parked.next_due() for owned in starting), default=NEVER)
        return max(0.0, due - clock())

    def retry_now(self) -> None:
        """Make delayed key queues due."""
        with self.lock:
            self._delayed = [(0.0, number, key_queue) for _, number, key_queue in self._delayed]
            heapq.heapify(self._delayed)

    def _may_start(self, owned: OwnedPartition, parked_key: OwnedParkedKey) -> bool:
        if parked_key.entry is not None or parked_key.queue is not None or parked_key.unsettled:
            return False
        key_queue = owned.queues.get(parked_key.ref.name)
        return key_queue is None or not key_queue.batch

    def _end_resumed(self, owned: OwnedPartition) -> None:
        owned.running -= 1
        if owned.running == 0:
            self.changed.notify_all()

    def _unpark(self, owned: OwnedPartition, parked_key: OwnedParkedKey) -> None:
        owned.parked.remove(parked_key)
        key_queue = owned.queues.get(parked_key.ref.name)
        if key_queue is not None and key_queue.parked_key is parked_key:
            key_queue.parked_key, key_queue.uncertain = None, 0
            if key_queue.records and not key_queue.batch:
                if key_queue in owned.to_park:
                    owned.to_park.remove(key_queue)
                owned.skip_dead(key_queue)
                if key_queue.records:
                    self._enqueue([key_queue])
                else:
                    owned.end_or_reload(key_queue)

    def _park_queue(self, owned: OwnedPartition, parked_key: OwnedParkedKey) -> None:
        owned.parked.add(parked_key)
        key_queue = owned.queues.get(parked_key.ref.name)
        if key_queue is not None:
            key_queue.parked_key = parked_key
            queue_key = (owned.partition, key_queue.key)
            if self._behind_running.get(queue_key) is key_queue:
                del self._behind_running[queue_key]
            elif key_queue in self._ready:
                self._ready.remove(key_queue)
            else:
                return
            owned.to_park.append(key_queue)
            self.on_parking()

    def _drop_parking_tasks(self, owned: OwnedPartition) -> None:
        self._returned = deque(key_queue for key_queue in self._returned if key_queue.owned is not owned)
        while owned.to_dead_letter:
            self._finish(owned.to_dead_letter.popleft()[0], 0.0)

    def stop(self) -> None:
        """End all workers."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        if self.on_ready is not None:
            self.on_ready()

    def _collect_finished(self) -> None:
        done = self._done
        while done:
            self._finish(done.popleft(), 0.0)

    def _finish(self, key_queue: KeyQueue, delay_s: float) -> None:
        owned = key_queue.owned
        if key_queue.resumed and owned.state is not OwnershipState.GONE:
            key_queue.batch = ()
            self._returned.append(key_queue)
            self.on_parking()
            return
        owned.running -= 1
        key_queue.batch = ()
        if owned.state is not OwnershipState.OPEN:
            self._end(key_queue)
        elif not key_queue.records:
            owned.end_or_reload(key_queue)
        elif key_queue.parked_key is not None:
            owned.to_park.append(key_queue)
            self.on_parking()
        elif delay_s > 0:
            self._delay(key_queue, delay_s)
        else:
            self._ready.append(key_queue)
            if self._message_s >= QUICK_S:
                self._wake()

    def _delay(self, key_queue: KeyQueue, seconds: float) -> None:
        key_queue.owned.spill(key_queue)
        key_queue.owned.backing_off += 1
        heapq.heappush(self._delayed, (clock() + seconds, next(self._order), key_queue))

    def _enqueue(self, key_queues: list[KeyQueue]) -> None:
        if self._still_running:
            key_queues = [key_queue for key_queue in key_queues if not self._wait_for_running(key_queue)]
        self._ready.extend(key_queues)
        self._wake()

    def _wait_for_running(self, key_queue: KeyQueue) -> bool:
        """Wait behind a dropped ownership's handler of this key; False without one."""
        queue_key = (key_queue.owned.partition, key_queue.key)
        if queue_key not in self._still_running:
            return False
        self._behind_running[queue_key] = key_queue
        return True

    def _end(self, key_queue: KeyQueue) -> None:
        owned = key_queue.owned
        if not key_queue.resumed:
            owned.queues.pop(key_queue.key, None)
        queue_key = (owned.partition, key_queue.key)
        if owned.state is OwnershipState.GONE and queue_key in self._still_running:
            self._still_running[queue_key] -= 1
            if not self._still_running[queue_key]:
                del self._still_running[queue_key]
                waiting = self._behind_running.pop(queue_key, None)
                if waiting is not None:
                    self._enqueue([waiting])
        if owned.running == 0:
            self.changed.notify_all()

    def _drop_waiting(self, owned: OwnedPartition) -> None:
        for key_queue in (*self._ready, *self._behind_running.values()):
            if key_queue.owned is owned and key_queue.resumed:
                # Delivered and not begun, but recorded as started in Postgres.
                self._returned.append(key_queue)
                self.on_parking()
        self._ready = deque(key_queue for key_queue in self._ready if key_queue.owned is not owned)
        self._delayed = [entry for entry in self._delayed if entry[2].owned is not owned]
        heapq.heapify(self._delayed)
        self._behind_running = {
            s: key_queue for s, key_queue in self._behind_running.items() if key_queue.owned is not owned
        }
        owned.to_reload.clear()
        owned.to_park.clear()
        self.changed.notify_all()

    def _fill(self, local_queue: deque[KeyQueue]) -> bool:
        self._collect_finished()
        if self.stopping or not self.lease.holds():
            return False
        ready = self._ready
        wanted = min(CHUNK, 1 + len(ready) // max(1, len(self._local_queues))) if self._message_s < QUICK_S else 1
        while ready and len(local_queue) < wanted:
            key_queue = ready.popleft()
            if key_queue.owned.state is OwnershipState.OPEN:
                key_queue.batch, key_queue.records = key_queue.records, []
                # A resumed key queue counts as running until its result is in Postgres.
                key_queue.owned.running += not key_queue.resumed
                local_queue.append(key_queue)
        return bool(local_queue)

    def _steal(self, local_queue: deque[KeyQueue]) -> None:
        for other in self._local_queues:
            for _ in range((len(other) + 1) // 2):
                try:
                    local_queue.appendleft(other.pop())
                except IndexError:
                    break
            if local_queue:
                return

    def _release_due(self) -> None:
        now = clock()
        while self._delayed and self._delayed[0][0] <= now:
            key_queue = heapq.heappop(self._delayed)[2]
            key_queue.owned.backing_off -= 1
            key_queue.owned.to_reload.append(key_queue)

    def _enqueue_or_park(self, key_queue: KeyQueue) -> None:
        if key_queue.parked_key is None:
            self._enqueue([key_queue])
        else:
            key_queue.owned.to_park.append(key_queue)
            self.on_parking()

    def _wake(self) -> None:
        if self._idle:
            # A second worker pays off where the work exceeds what the first does during a wake-up.
            self.changed.notify(1 + int(len(self._ready) * min(1.0, self._message_s / WORTH_S)))
        if self.on_ready is not None:
            self.on_ready()


def _nothing() -> None:
    """Do nothing."""
