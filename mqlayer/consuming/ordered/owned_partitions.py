"""What a member holds: partitions under an epoch, and in each the key queues of its keys.

States of an owned partition: *new* (assigned, pull lock not taken) -> *open* -> *draining* (nothing is started any
more) ->
*gone* (released, fenced or lost). Only *open* starts messages. A key queue is one key's line of unsettled messages:
*waiting* (in the ready queue), *running* (one worker has it), *delayed* (its head failed), *spilled* (what waits behind
the head is to be read again). At most one worker has a key queue, so at most one message of a key is under way
(invariant 11). A key queue of a parked key goes to the parking worker instead of the workers, who have the key's first
messages in a key queue of their own, *resumed* from Postgres.
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
"""How far beyond committed a member reads: less than the window of offsets_settle (1,048,576 offsets)."""


EVERY_OFFSET = 1 << 62


class OwnershipState(Enum):
    """Where an owned partition stands."""

    NEW = auto()
    OPEN = auto()
    DRAINING = auto()
    GONE = auto()


class GuardedStart:
    """A message that is to be started with care: its worker waits until the server knows."""

    __slots__ = ("alone", "offset", "recorded")

    def __init__(self, offset: int, *, alone: bool) -> None:
        self.offset, self.alone = offset, alone
        self.recorded = threading.Event()


class KeyQueue:
    """One key's messages that are not handled, in order. `batch` is what a worker has in hand.

    `spilled` holds the offsets of what follows `records` while the key queue is spilled: a failing key's backlog must
    not fill the bounds that all keys share. None: the key queue is not spilled.
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
        # Where workers put what they have handled.
        self.handled: deque[Record] = owned.settled
        # Offsets below are started with care: one of them may have killed the former owners.
        self.guarded_below = owned.guarded_below
        # Of batch handlers: offsets below are given to them one by one, and since when the key queue waits for a
        # worker.
        self.singly, self.since = 0, 0.0
        # Set while its key is parked.
        self.parked_key: OwnedParkedKey | None = None
        # So many of its first messages may be parked already: the answer to that did not come.
        self.uncertain = 0
        self.resumed = False
        # Why the first message that it has left failed, for the parking worker.
        self.action: FailureAction | None = None


class OwnedPartition:
    """One partition under one epoch. Fields marked (lock) change under the dispatcher's lock only."""

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
        # Nothing is read of its stream: a replay has newer messages wait. Until the parking worker knows what that has
        # parked.
        self.waits_for_replay = assignment.waits_for_replay
        self.queues: dict[bytes, KeyQueue] = {}  # (lock)
        self.running = 0  # (lock) key queues that workers have in hand
        self.count_in_flight = 0  # (lock) read and not acknowledged as settled
        self.bytes_in_flight = 0  # (lock)
        self.spilled = 0  # (lock) key queues that are spilled
        self.full = False  # nothing is read of it at present, for lack of room; by its reader
        self.backing_off = 0  # (lock) spilled key queues that wait for their backoff
        self.to_reload: deque[KeyQueue] = deque()  # (lock) spilled key queues that are due, to be read again
        self.settled: deque[Record] = deque()  # handled; appended by workers, taken one by one by the settler
        # To be settled without being handled from here: parked, dead, or another partition's; likewise.
        self.to_settle: deque[Record] = deque()
        # Offsets that the group's filter leaves out, to be settled as they are; likewise.
        self.unmatched: deque[OffsetRange] = deque()
        self.failed: deque[tuple[int, int]] = deque()  # offset and its failed attempts, to be counted; likewise
        self.deliveries = DeliveryTimes()  # of an archived topic: when what is not settled was given to us
        self.attempts: dict[int, int] = {}
        self.failing_since: dict[int, float] = {}  # offset -> when it failed first, here
        self.parked = OwnedParkedKeys()  # (lock)
        self.parking_version = 0  # how many of others' acts on parked keys it knows, for the parking worker
        self.to_park: deque[KeyQueue] = deque()  # (lock) key queues of parked keys that hold messages
        self.uncertain = False  # some of these may be parked already; for the parking worker
        self.to_dead_letter: deque[tuple[KeyQueue, DeadLetterEntry]] = (
            deque()
        )  # (lock) key queues whose first message leaves the group
        self.dead: set[Identity] = set()  # left the group, and may come once more
        self.finished = False  # (lock) nothing is started here any more: its successors go on
        self.guarded_below = 0  # offsets below are started with care
        self.guarded_starts: deque[GuardedStart] = deque()  # to be noted before a worker begins, by the settler
        self.starts_recorded: set[int] = (
            set()
        )  # of these, those that the server knows as started, and nothing failed since
        self.suspects: set[int] = set()  # of these, those that are started alone
        self.died: set[int] = set()  # of these, those that were, and never ended
        self.settled_before: tuple[int, bytes] | None = None  # base and bits of the former owner's ack bitmap
        self.committed = self.next_read = 0
        self.record_bytes = 1024.0
        self.drain_until = float("inf")
        self.cut: Mapping[str, int] = {}  # of marks, beyond which its successors have it too; mostly none
        self.command: CommandRecord | None = None  # once it was read: nothing follows

    @property
    def partition(self) -> PartitionId:
        """The partition's id."""
        return self.assignment.partition

    @property
    def epoch(self) -> int:
        """The epoch it is held under."""
        return self.assignment.epoch

    def start_at(self, lock: LockTaken) -> None:
        """Go on where the former owner stopped: from committed, without what is settled above it."""
        self.committed = lock.committed
        self.settled_before = (lock.base, lock.bits) if lock.bits else None
        self.next_read = first_unsettled(lock.committed, lock.base, lock.bits)
        self.attempts = lock.attempts
        self.guarded_below, self.suspects, self.died = lock.guarded_below, set(lock.suspects), set(lock.died)
        self.state = OwnershipState.OPEN

    def add(self, records: list[Record], last: int) -> list[KeyQueue]:
        """Put new records, read up to an offset, into their key queues; return those that got ready. Call under the
        lock."""
        ready: list[KeyQueue] = []
        key_queues = self.queues
        records = self._handleable(records, last)
        size = admitted = 0
        ordered, parked = self.ordered, self.parked
        for record in records:
            offset, m, key, body = record
            # Messages without a key wait for nobody: each has a key queue of its own.
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
        """Have offsets settled that the group's filter leaves out; admit what was read beside them after this."""
        self.unmatched.extend(unmatched)
        if self.parked.expected:
            self.parked.exclude(unmatched)

    def parked_name(self, record: Record) -> bytes:
        """Return the name under which a message would be parked."""
        if self.ordered and record.key != NO_KEY:
            # Asked for every message while some key is parked: to find out an identity costs more than all the rest.
            return record.key
        return parked_name(record.key, record.identity, alone=True)

    def _handleable(self, records: list[Record], last: int) -> list[Record]:
        """Leave out what was settled before, or leaves without being handled."""
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
        """Take some of the records as settled, unhandled."""
        remaining: list[Record] = []
        excluded: list[Record] = []
        for record in records:
            (excluded if passed_over(record) else remaining).append(record)
        self.count_in_flight += len(excluded)
        self.bytes_in_flight += sum(map(size_of, excluded))
        self.to_settle.extend(excluded)
        return remaining

    def skip_dead(self, key_queue: KeyQueue) -> None:
        """Take as settled what died of a key queue since it was read. Call under the lock."""
        if self.dead:
            dead = [record for record in key_queue.records if self._is_dead(record)]
            key_queue.records = [record for record in key_queue.records if not self._is_dead(record)]
            self.to_settle.extend(dead)

    def _is_cut_off(self, record: Record) -> bool:
        """Say whether a record lies beyond the recorded marks: the successors have it, and handle it."""
        source, lp, seq = record.identity
        return seq > self.cut.get(f"{source}:{lp}", seq)

    def _is_dead(self, record: Record) -> bool:
        """Say whether a record is listed as dead: whoever did that died before it was settled, or was an operator."""
        return record.identity in self.dead

    def _without_settled(self, records: list[Record], last: int, base: int, bits: bytes) -> list[Record]:
        """Leave out what the former owner settled above committed, and read on behind it."""
        self.next_read = first_unsettled(last + 1, base, bits)
        if self.next_read >= base + 8 * len(bits):
            self.settled_before = None
        return [record for record in records if not is_settled(record.offset, base, bits)]

    def spill(self, key_queue: KeyQueue) -> None:
        """Keep of a failing key queue the offsets only; it still counts as one in hand. Call under the lock."""
        if key_queue.spilled is None:
            key_queue.spilled = array("q")
            self.spilled += 1
        key_queue.spilled[:0] = array("q", [record.offset for record in key_queue.records])
        self.release(key_queue.records)
        self.count_in_flight += 1
        key_queue.records = []

    def end_or_reload(self, key_queue: KeyQueue) -> None:
        """Nothing that was read is left of a key queue. Call under the lock."""
        if key_queue.spilled is None:
            del self.queues[key_queue.key]
        else:
            self.reload_or_end(key_queue)

    def reload_or_end(self, key_queue: KeyQueue) -> None:
        """A spilled key queue has nothing in memory any more: have it filled again, or end it. Call under the lock."""
        if key_queue.spilled:
            self.count_in_flight += 1
            self.to_reload.append(key_queue)
        else:
            self.spilled -= 1
            del self.queues[key_queue.key]

    def reload(self, key_queue: KeyQueue, records: list[Record], asked: int) -> None:
        """Put back what was read again of the first `asked` offsets of a spilled key queue. Call under the lock."""
        spilled = key_queue.spilled or array("q")
        del spilled[:asked]
        if self.dead:
            # It may have died since it was read first.
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
        """Make room: these are not in hand any more. Call under the lock."""
        self.count_in_flight -= len(records)
        self.bytes_in_flight -= sum(map(size_of, records))

    def capacity(self, count_share: int, bytes_share: int, read_count: int) -> int:
        """Return how many records to read now, by count, by bytes and by reach; 0 where that is not worth a read.

        A failing key takes no room from others by bytes, and one by count, however much waits behind it.
        """
        by_bytes = int((bytes_share - self.bytes_in_flight) / self.record_bytes)
        capacity = min(count_share - self.count_in_flight, by_bytes, self.reach)
        others = count_share - self.spilled
        if self.count_in_flight <= self.spilled:
            # One record is always allowed into an empty hand, however large it is.
            capacity = max(capacity, min(1, self.reach, others))
        # A quarter of what may be in hand at the least: no reads of one record at a time.
        enough = min(others, int(bytes_share / self.record_bytes)) // 4
        return capacity if capacity >= min(max(1, enough), read_count) else 0

    @property
    def is_settled(self) -> bool:
        """Whether everything before the command record is settled, by the server's word."""
        return self.command is not None and self.committed >= self.command.end

    @property
    def reach(self) -> int:
        """How many offsets the ack bitmap still takes beyond what was read."""
        return self.committed + BITMAP_REACH - self.next_read


class OwnedPartitions:
    """All that a member holds, by partition; for any of its threads."""

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
        """Return the owned partitions on one node."""
        with self._changed:
            return [owned for owned in self._by_partition.values() if owned.assignment.node == node_id]

    def get(self, partition: PartitionId) -> OwnedPartition | None:
        """Return the owned partition of a partition."""
        with self._changed:
            return self._by_partition.get(partition)

    def add(self, owned: OwnedPartition) -> bool:
        """Add an owned partition; False once they are closed."""
        with self._changed:
            if not self._closed:
                self._by_partition[owned.partition] = owned
            return not self._closed

    def remove(self, owned: OwnedPartition) -> None:
        """Remove this very owned partition; a later one of the partition stays."""
        with self._changed:
            if self._by_partition.get(owned.partition) is owned:
                del self._by_partition[owned.partition]
            self._changed.notify_all()

    def close(self) -> None:
        """Let nothing more in."""
        with self._changed:
            self._closed = True

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until nothing is held."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._by_partition, timeout=max(0.0, timeout_s))


def size_of(record: Record) -> int:
    """Return how much of the bound by bytes a record takes."""
    _, m, key, body = record
    return len(m) + len(key) + len(body)


def parked_key_for(action: ParkKey, key_queue: KeyQueue, record: Record) -> OwnedParkedKey:
    """Return the parking of a key queue's key, whose message failed."""
    ref = KeyRef(record.identity.lp, key_queue.owned.parked_name(record))
    due = NEVER if action.seconds is None else clock() + action.seconds
    entry = KeyEntry(ref, action.cause, action.seconds, action.attempts)
    return OwnedParkedKey(ref, attempts=action.attempts, due=due, entry=entry)


def resumed_queue(owned: OwnedPartition, parked_key: OwnedParkedKey, records: list[ParkedRecord]) -> KeyQueue:
    """Return a key queue with messages of a parked key that are to be handled now."""
    key_queue = KeyQueue(owned, parked_key.ref.name, records[0])
    key_queue.records = [*records]
    key_queue.handled = deque()
    key_queue.parked_key, key_queue.resumed = parked_key, True
    parked_key.resumed_at = clock()
    key_queue.guarded_below = EVERY_OFFSET if parked_key.died else 0
    parked_key.queue = key_queue
    return key_queue
