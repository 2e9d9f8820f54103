"""Partitions that a member owns, each with one key queue per key.

An owned partition is *new* -> *open* (pull lock taken) -> *draining* -> *gone*.
A key queue is *waiting*, *running*, *delayed* (its head failed) or *spilled* (reduced to offsets). A parked key's queue
goes to the parking worker; its first messages return from Postgres in a separate, *resumed* key queue.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.delivery_times import DeliveryTimes
from mqlayer.consuming.engine.failure_actions import FailureAction, ParkKey
from mqlayer.consuming.ordered.parked_keys import NEVER, OwnedParkedKey, OwnedParkedKeys
from mqlayer.domain.message import NO_KEY, CommandRecord, Identity, ParkedRecord, Record
from mqlayer.domain.offsets import OffsetRange, first_unsettled, is_settled
from mqlayer.domain.parked_names import parked_name
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.groups.members import Assignment
from mqlayer.parking import DeadLetterEntry, KeyEntry, KeyRef
from mqlayer.redis.partition_scripts import LockHolder, LockTaken

BITMAP_REACH = 1_000_000
"""Read-ahead beyond committed; below `offsets_settle`'s window of 1,048,576."""


EVERY_OFFSET = 1 << 62


class OwnershipState(Enum):
    """State of an owned partition."""

    NEW = auto()
    OPEN = auto()
    DRAINING = auto()
    GONE = auto()


class GuardedStart:
    """A message whose start is recorded before its handler runs."""

    __slots__ = ("alone", "offset", "recorded")

    def __init__(self, offset: int, *, alone: bool) -> None:
        self.offset, self.alone = offset, alone
        self.recorded = threading.Event()


class KeyQueue:
    """One key's unhandled messages, in order; `batch` is a worker's part.

    `spilled`: offsets behind `records`, else None; a failing key's backlog must not use shared room.
    """

    __slots__ = (
        "action",
        "batch",
        "guarded_below",
        "handled",
        "key",
        "owned",
        "parked_key",
        "records",
        "resumed",
        "since",
        "singly",
        "spilled",
        "uncertain",
    )  # fmt: skip

    def __init__(self, owned: OwnedPartition, key: bytes, record: Record) -> None:
        self.owned, self.key = owned, key
        self.records = [record]
        self.batch: Sequence[Record] = ()
        self.spilled: array[int] | None = None
        # Where workers append handled records.
        self.handled: deque[Record] = owned.settled
        # Starts of lower offsets are recorded first: one of them may have killed the former owners.
        self.guarded_below = owned.guarded_below
        # Of batch handlers: lower offsets come one by one; when the key queue began to wait.
        self.singly, self.since = 0, 0.0
        # Set while the key is parked.
        self.parked_key: OwnedParkedKey | None = None
        # How many leading messages may be parked already: the answer was lost.
        self.uncertain = 0
        self.resumed = False
        # Why the first remaining message failed, for the parking worker.
        self.action: FailureAction | None = None


class OwnedPartition:
    """One partition under one epoch. Fields marked (lock), and methods that change them, need the dispatcher's lock."""

    __slots__ = (
        "assignment",
        "attempts",
        "backing_off",
        "bytes_in_flight",
        "command",
        "committed",
        "count_in_flight",
        "cut",
        "dead",
        "deliveries",
        "died",
        "drain_until",
        "failed",
        "failing_since",
        "finished",
        "full",
        "guarded_below",
        "guarded_starts",
        "lock_holder",
        "next_read",
        "ordered",
        "parked",
        "parking_version",
        "queues",
        "record_bytes",
        "running",
        "settled",
        "settled_before",
        "spilled",
        "starts_recorded",
        "state",
        "suspects",
        "to_dead_letter",
        "to_park",
        "to_reload",
        "to_settle",
        "uncertain",
        "unmatched",
        "waits_for_replay",
    )

    def __init__(self, assignment: Assignment, lock_holder: LockHolder, *, ordered: bool = True) -> None:
        self.assignment, self.lock_holder, self.ordered = assignment, lock_holder, ordered
        self.state = OwnershipState.NEW
        # Nothing is read: a replay holds newer messages back, until the parking worker has loaded the keys that it
        # parked.
        self.waits_for_replay = assignment.waits_for_replay
        self.queues: dict[bytes, KeyQueue] = {}  # (lock)
        self.running = 0  # (lock) key queues that workers have
        self.count_in_flight = 0  # (lock) read and not settled
        self.bytes_in_flight = 0  # (lock)
        self.spilled = 0  # (lock) key queues that are spilled
        self.full = False  # no room for reads; set by its reader
        self.backing_off = 0  # (lock) spilled key queues that wait for their backoff
        self.to_reload: deque[KeyQueue] = deque()  # (lock) spilled key queues that are due
        self.settled: deque[Record] = deque()  # handled; workers append, the settler pops
        # Settled without a handler here: parked, dead, or another partition's; likewise.
        self.to_settle: deque[Record] = deque()
        # Filtered offsets to settle; likewise.
        self.unmatched: deque[OffsetRange] = deque()
        self.failed: deque[tuple[int, int]] = deque()  # (offset, failed attempts) to record; likewise
        self.deliveries = DeliveryTimes()  # of an archived topic: delivery times of unsettled offsets
        self.attempts: dict[int, int] = {}
        self.failing_since: dict[int, float] = {}  # offset -> first failure in this process
        self.parked = OwnedParkedKeys()  # (lock)
        self.parking_version = 0  # others' changes to parked keys that are applied here
        self.to_park: deque[KeyQueue] = deque()  # (lock) key queues of parked keys that hold messages
        self.uncertain = False  # some of these may be parked already
        self.to_dead_letter: deque[tuple[KeyQueue, DeadLetterEntry]] = (
            deque()
        )  # (lock) key queues whose first message leaves the group
        self.dead: set[Identity] = set()  # left the group, and may be read again
        self.finished = False  # (lock) nothing more starts: the successors continue
        self.guarded_below = 0  # starts of lower offsets are recorded first
        self.guarded_starts: deque[GuardedStart] = deque()  # the settler records them before workers begin
        self.starts_recorded: set[int] = set()  # recorded on the node, and not failed since
        self.suspects: set[int] = set()  # offsets that start alone
        self.died: set[int] = set()  # lone starts that never ended
        self.settled_before: tuple[int, bytes] | None = None  # base and bits of the former owner's ack bitmap
        self.committed = self.next_read = 0
        self.record_bytes = 1024.0
        self.drain_until = float("inf")
        self.cut: Mapping[str, int] = {}  # marks beyond which the successors have the messages too; mostly empty
        self.command: CommandRecord | None = None  # set once read: nothing follows

    @property
    def partition(self) -> PartitionId:
        """The partition's id."""
        return self.assignment.partition

    @property
    def epoch(self) -> int:
        """The assignment's epoch."""
        return self.assignment.epoch

    def start_at(self, lock: LockTaken) -> None:
        """Open at the former owner's position."""
        self.committed = lock.committed
        self.settled_before = (lock.base, lock.bits) if lock.bits else None
        self.next_read = first_unsettled(lock.committed, lock.base, lock.bits)
        self.attempts = lock.attempts
        self.guarded_below, self.suspects, self.died = lock.guarded_below, set(lock.suspects), set(lock.died)
        self.state = OwnershipState.OPEN

    def add(self, records: list[Record], last: int) -> list[KeyQueue]:
        """Queue records; return key queues that became ready."""
        ready: list[KeyQueue] = []
        key_queues = self.queues
        records = self._handleable(records, last)
        size = admitted = 0
        ordered, parked = self.ordered, self.parked
        for record in records:
            offset, m, key, body = record
            # Messages without a key wait for no other: each has its own key queue.
            name = key if ordered and key != NO_KEY else b"%b%d" % (NO_KEY, offset)
            key_queue = key_queues.get(name)
            if key_queue is None:
                key_queues[name] = key_queue = KeyQueue(self, name, record)
                if parked:
                    key_queue.parked_key = parked.by_name.get(self.parked_name(record))
                (ready if key_queue.parked_key is None else self.to_park).append(key_queue)
            elif key_queue.spilled is None:
                key_queue.records.append(record)
            else:
                key_queue.spilled.append(offset)
                continue
            size += len(m) + len(key) + len(body)
            admitted += 1
        self.count_in_flight += admitted
        self.bytes_in_flight += size
        self.next_read = max(self.next_read, last + 1)
        if admitted:
            self.record_bytes = max(size / admitted, 0.9 * self.record_bytes)
        return ready

    def add_unmatched(self, unmatched: Sequence[OffsetRange]) -> None:
        """Settle filtered offsets; call before `add`."""
        self.unmatched.extend(unmatched)
        if self.parked.expected:
            self.parked.exclude(unmatched)

    def parked_name(self, record: Record) -> bytes:
        """Return a message's name for parking."""
        if self.ordered and record.key != NO_KEY:
            # Called for every message while any key is parked; computing an identity would dominate its cost.
            return record.key
        return parked_name(record.key, record.identity, alone=True)

    def _handleable(self, records: list[Record], last: int) -> list[Record]:
        if self.settled_before is not None:
            records = self._without_settled(records, last, *self.settled_before)
        if self.cut:
            records = self._without(records, self._is_cut_off)
        if self.dead:
            records = self._without(records, self._is_dead)
        if self.parked.expected:
            self.parked.read({record.offset: self.parked_name(record) for record in records}, last)
        return records

    def _without(self, records: list[Record], passed_over: Callable[[Record], bool]) -> list[Record]:
        remaining: list[Record] = []
        excluded: list[Record] = []
        for record in records:
            (excluded if passed_over(record) else remaining).append(record)
        self.count_in_flight += len(excluded)
        self.bytes_in_flight += sum(map(size_of, excluded))
        self.to_settle.extend(excluded)
        return remaining

    def skip_dead(self, key_queue: KeyQueue) -> None:
        """Settle dead messages."""
        if self.dead:
            dead = [record for record in key_queue.records if self._is_dead(record)]
            key_queue.records = [record for record in key_queue.records if not self._is_dead(record)]
            self.to_settle.extend(dead)

    def _is_cut_off(self, record: Record) -> bool:
        """Say whether the successors handle a record instead."""
        source, lp, seq = record.identity
        return seq > self.cut.get(f"{source}:{lp}", seq)

    def _is_dead(self, record: Record) -> bool:
        return record.identity in self.dead

    def _without_settled(self, records: list[Record], last: int, base: int, bits: bytes) -> list[Record]:
        self.next_read = first_unsettled(last + 1, base, bits)
        if self.next_read >= base + 8 * len(bits):
            self.settled_before = None
        return [record for record in records if not is_settled(record.offset, base, bits)]

    def spill(self, key_queue: KeyQueue) -> None:
        """Reduce a key queue to offsets."""
        if key_queue.spilled is None:
            key_queue.spilled = array("q")
            self.spilled += 1
        key_queue.spilled[:0] = array("q", [record.offset for record in key_queue.records])
        self.release(key_queue.records)
        self.count_in_flight += 1
        key_queue.records = []

    def end_or_reload(self, key_queue: KeyQueue) -> None:
        """End or reload an empty key queue."""
        if key_queue.spilled is None:
            del self.queues[key_queue.key]
        else:
            self.reload_or_end(key_queue)

    def reload_or_end(self, key_queue: KeyQueue) -> None:
        """Reload or end a spilled key queue."""
        if key_queue.spilled:
            self.count_in_flight += 1
            self.to_reload.append(key_queue)
        else:
            self.spilled -= 1
            del self.queues[key_queue.key]

    def reload(self, key_queue: KeyQueue, records: list[Record], asked: int) -> None:
        """Add the first `asked` spilled offsets' records."""
        spilled = key_queue.spilled or array("q")
        del spilled[:asked]
        if self.dead:
            # They may have died since the first read.
            records = self._without(records, self._is_dead)
        key_queue.records = records
        self.count_in_flight += len(records) - 1
        self.bytes_in_flight += sum(map(size_of, records))
        if not records:
            self.reload_or_end(key_queue)
        elif not spilled:
            key_queue.spilled = None
            self.spilled -= 1

    def release(self, records: list[Record]) -> None:
        """Free the records' room."""
        self.count_in_flight -= len(records)
        self.bytes_in_flight -= sum(map(size_of, records))

    def capacity(self, count_share: int, bytes_share: int, read_count: int) -> int:
        """Return how many records to read; 0 where a read is not worthwhile."""
        by_bytes = int((bytes_share - self.bytes_in_flight) / self.record_bytes)
        capacity = min(count_share - self.count_in_flight, by_bytes, self.reach)
        others = count_share - self.spilled
        if self.count_in_flight <= self.spilled:
            # An empty partition may always read one record, however large.
            capacity = max(capacity, min(1, self.reach, others))
        # At least a quarter of the bound: no reads of single records.
        enough = min(others, int(bytes_share / self.record_bytes)) // 4
        return capacity if capacity >= min(max(1, enough), read_count) else 0

    @property
    def is_settled(self) -> bool:
        """Whether everything before the command record is settled."""
        return self.command is not None and self.committed >= self.command.end

    @property
    def reach(self) -> int:
        """Offsets left in the ack bitmap."""
        return self.committed + BITMAP_REACH - self.next_read


class OwnedPartitions:
    """A member's partitions. Thread-safe."""

    def __init__(self) -> None:
        self._by_partition: dict[PartitionId, OwnedPartition] = {}
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._by_partition)

    def all(self) -> list[OwnedPartition]:
        """Return every owned partition."""
        with self._changed:
            return list(self._by_partition.values())

    def on(self, node_id: NodeId) -> list[OwnedPartition]:
        """Return a node's owned partitions."""
        with self._changed:
            return [owned for owned in self._by_partition.values() if owned.assignment.node == node_id]

    def get(self, partition: PartitionId) -> OwnedPartition | None:
        """Return the owned partition, or None."""
        with self._changed:
            return self._by_partition.get(partition)

    def add(self, owned: OwnedPartition) -> bool:
        """Add unless closed; say whether added."""
        with self._changed:
            if not self._closed:
                self._by_partition[owned.partition] = owned
            return not self._closed

    def remove(self, owned: OwnedPartition) -> None:
        """Remove this object, not its successor."""
        with self._changed:
            if self._by_partition.get(owned.partition) is owned:
                del self._by_partition[owned.partition]
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse further partitions."""
        with self._changed:
            self._closed = True

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait; say whether empty."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._by_partition, timeout=max(0.0, timeout_s))


def size_of(record: Record) -> int:
    """Return a record's bytes."""
    _, m, key, body = record
    return len(m) + len(key) + len(body)


def parked_key_for(action: ParkKey, key_queue: KeyQueue, record: Record) -> OwnedParkedKey:
    """Return the parked key of a failed message."""
    ref = KeyRef(record.identity.lp, key_queue.owned.parked_name(record))
    due = NEVER if action.seconds is None else clock() + action.seconds
    entry = KeyEntry(ref, action.cause, action.seconds, action.attempts)
    return OwnedParkedKey(ref, attempts=action.attempts, due=due, entry=entry)


def resumed_queue(owned: OwnedPartition, parked_key: OwnedParkedKey, records: list[ParkedRecord]) -> KeyQueue:
    """Return a key queue of a parked key's messages."""
    key_queue = KeyQueue(owned, parked_key.ref.name, records[0])
    key_queue.records = [*records]
    key_queue.handled = deque()
    key_queue.parked_key, key_queue.resumed = parked_key, True
    parked_key.resumed_at = clock()
    key_queue.guarded_below = EVERY_OFFSET if parked_key.died else 0
    parked_key.queue = key_queue
    return key_queue
