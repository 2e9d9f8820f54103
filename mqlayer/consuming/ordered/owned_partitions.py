"""A partition that a member owns, with one key queue per key.

An owned partition is *new* -> *open* (pull lock taken) -> *draining* -> *gone*.
A key queue is *waiting*, *running*, *delayed* (its head failed) or *spilled* (reduced to offsets). A parked key's queue
goes to the parking worker; its first messages return from Postgres in a separate, *resumed* key queue.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import cast

from mqlayer.consuming.engine.class_limits import ClassTurn
from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.delivery_times import DeliveryTimes
from mqlayer.consuming.engine.failure_actions import ParkKey
from mqlayer.consuming.ordered.attempts import Attempts
from mqlayer.consuming.ordered.class_backlogs import ClassBacklogs, ClassShare
from mqlayer.consuming.ordered.excluded_records import ExcludedRecords
from mqlayer.consuming.ordered.parked_keys import NEVER, OwnedParkedKey, OwnedParkedKeys, QueuedMessages
from mqlayer.consuming.ordered.results import Results, Room
from mqlayer.domain.message import NO_KEY, CommandRecord, ParkedRecord, Record
from mqlayer.domain.offsets import OffsetRange
from mqlayer.domain.parked_names import parked_name
from mqlayer.domain.routing import PartitionId
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


class KeyQueue(QueuedMessages, eq=False):
    """One key's queue in its partition. With one message per key, each message gets one: a struct is made at once.

    `spilled`: offsets behind `records`, else None; a failing key's backlog must not use shared room.
    """

    owned: OwnedPartition = cast("OwnedPartition", None)
    # Starts of lower offsets are recorded first: one of them may have killed the former owners.
    guarded_below: int = 0
    # Of batch handlers: lower offsets come one by one; when the key queue began to wait.
    singly: int = 0
    since: float = 0.0
    spilled: array[int] | None = None
    # Set while the key is parked.
    parked_key: OwnedParkedKey | None = None
    # How many leading messages may be parked already: the answer was lost.
    uncertain: int = 0
    resumed: bool = False
    # Of a group with key classes: where it takes turns, and where its messages count.
    class_turn: ClassTurn | None = None
    # The class among whose running keys a worker's part counts.
    counts_for: ClassTurn | None = None
    share: ClassShare | None = None

    def begin(self, count: int) -> None:
        """Give a worker its part: the first messages."""
        if count >= len(self.records):
            self.batch, self.records = self.records, []
        else:
            super().begin(count)
        if self.share is not None:
            self.share.count(-len(self.batch))

    def put_back(self, leftover: Sequence[Record]) -> None:
        """Put messages first again."""
        super().put_back(leftover)
        self.count_waiting(len(leftover))
        if self.counts_for is not None:
            self.counts_for.returned(len(leftover))

    def count_waiting(self, change: int) -> None:
        """Count messages in memory for its class."""
        if self.share is not None:
            self.share.count(change)

    @property
    def failed_before(self) -> bool:
        """Whether its first spilled message failed."""
        spilled = self.spilled
        return spilled is not None and len(spilled) > 0 and spilled[0] in self.owned.attempts


class ParkingQueue:
    """Key queues for the parking worker. Needs the lock."""

    __slots__ = ("_dead_letters", "_to_park", "uncertain", "version")

    def __init__(self) -> None:
        self._to_park: deque[KeyQueue] = deque()
        self._dead_letters: deque[tuple[KeyQueue, Sequence[DeadLetterEntry]]] = deque()
        self.uncertain = False
        """Some may be parked already."""
        self.version = 0
        """Others' changes to parked keys that are applied here."""

    def __bool__(self) -> bool:
        return bool(self._to_park)

    def __contains__(self, key_queue: KeyQueue) -> bool:
        return key_queue in self._to_park

    def add(self, key_queue: KeyQueue) -> None:
        """Add a parked key's queue that holds messages."""
        self._to_park.append(key_queue)

    def discard(self, key_queue: KeyQueue) -> None:
        """Take a key queue out."""
        if key_queue in self._to_park:
            self._to_park.remove(key_queue)

    def clear(self) -> None:
        """Take all of them out."""
        self._to_park.clear()

    def take(self, count: int, size: int) -> list[KeyQueue]:
        """Take batches, up to limits of messages, bytes."""
        if self.uncertain:
            # Possibly parked messages first: their key must not continue from Postgres before that is known.
            self._to_park = deque(sorted(self._to_park, key=lambda key_queue: not key_queue.uncertain))
        taken: list[KeyQueue] = []
        while self._to_park and (self._to_park[0].uncertain or (count > 0 and size > 0)):
            key_queue = self._to_park.popleft()
            most, key_queue.uncertain = key_queue.uncertain or count, 0
            key_queue.begin(most)
            taken.append(key_queue)
            count -= len(key_queue.batch)
            size -= sum(len(record.body) for record in key_queue.batch)
        return taken

    def synced(self, version: int) -> None:
        """Note which changes of others are applied here."""
        self.version = version

    def written(self) -> None:
        """Note that a transaction was answered."""
        self.uncertain = False

    def not_written(self, key_queue: KeyQueue) -> None:
        """Put a batch back; its messages may be parked already."""
        key_queue.put_back(key_queue.batch)
        key_queue.uncertain = len(key_queue.batch)
        self.uncertain = True

    def add_dead_letters(self, key_queue: KeyQueue, dead_letters: Sequence[DeadLetterEntry]) -> None:
        """Add a key queue whose first messages leave the group."""
        self._dead_letters.append((key_queue, dead_letters))

    def take_dead_letters(self) -> list[tuple[KeyQueue, Sequence[DeadLetterEntry]]]:
        """Take those."""
        return [self._dead_letters.popleft() for _ in range(len(self._dead_letters))]

    def put_back_dead_letters(self, dead_letters: Sequence[tuple[KeyQueue, Sequence[DeadLetterEntry]]]) -> None:
        """Take them back."""
        self._dead_letters.extendleft(reversed(dead_letters))


class SpilledQueues:
    """Spilled key queues. Needs the lock."""

    __slots__ = ("_due", "_owned")

    def __init__(self, owned: OwnedPartition) -> None:
        self._owned = owned
        self._due: deque[KeyQueue] = deque()

    def __bool__(self) -> bool:
        return bool(self._due)

    def take_due(self) -> list[KeyQueue]:
        """Take the key queues to reload."""
        return [self._due.popleft() for _ in range(len(self._due))]

    def put_back(self, key_queues: list[KeyQueue]) -> None:
        """Take key queues back that were not reloaded."""
        self._due.extendleft(reversed(key_queues))

    def clear(self) -> None:
        """Reload nothing."""
        self._due.clear()

    def add(self, key_queue: KeyQueue) -> None:
        """Reduce a key queue to offsets, until its backoff is over."""
        first = key_queue.spilled is None
        if key_queue.spilled is None:
            key_queue.spilled = array("q")
        key_queue.spilled[:0] = array("q", [record.offset for record in key_queue.records])
        self._owned.room.spill(key_queue.records, first=first)
        self._owned.room.back_off(1)
        key_queue.count_waiting(-len(key_queue.records))
        key_queue.records = []

    def backed_off(self, key_queue: KeyQueue) -> None:
        """Reload a key queue whose backoff is over."""
        self._owned.room.back_off(-1)
        self._due.append(key_queue)

    def reload(self, key_queue: KeyQueue, records: list[Record], asked: int) -> None:
        """Add the first `asked` spilled offsets' records."""
        room, spilled = self._owned.room, key_queue.spilled or array("q")
        del spilled[:asked]
        # They may have died since the first read.
        key_queue.records = self._owned.without_dead(records)
        key_queue.count_waiting(len(key_queue.records))
        room.keep(key_queue.records)
        room.take_place(-1)
        if not key_queue.records:
            self.continue_or_end(key_queue)
        elif not spilled:
            key_queue.spilled = None
            room.unspill()

    def continue_or_end(self, key_queue: KeyQueue) -> None:
        """Continue or end an empty key queue."""
        if key_queue.spilled:
            self._owned.room.take_place()
            self._due.append(key_queue)
        else:
            if key_queue.spilled is not None:
                self._owned.room.unspill()
            self._owned.forget(key_queue)


class OwnedPartition:
    """One partition under one epoch; alone writes its state. Methods marked (lock) need the dispatcher's lock."""

    __slots__ = (
        "assignment",
        "attempts",
        "backlogs",
        "command",
        "committed",
        "deliveries",
        "drain_until",
        "excluded",
        "finished",
        "guarded_below",
        "handled",
        "lock_holder",
        "next_read",
        "ordered",
        "parked",
        "queues",
        "results",
        "room",
        "running",
        "spilled",
        "state",
        "to_park",
        "waits_for_replay",
    )

    def __init__(
        self,
        assignment: Assignment,
        lock_holder: LockHolder,
        *,
        ordered: bool = True,
        cut: Mapping[str, int] | None = None,
    ) -> None:
        self.assignment, self.lock_holder, self.ordered = assignment, lock_holder, ordered
        self.state = OwnershipState.NEW
        # Nothing is read: a replay holds newer messages back, until the parking worker has loaded the keys that it
        # parked.
        self.waits_for_replay = assignment.waits_for_replay
        self.queues: dict[bytes, KeyQueue] = {}  # (lock)
        self.running = 0  # (lock) key queues that workers have
        self.finished = False  # (lock) nothing more starts: the successors continue
        self.room = Room()
        self.backlogs: ClassBacklogs | None = None  # (lock)
        self.results = Results()
        self.handled = self.results.handled  # workers append
        self.attempts = Attempts()
        self.guarded_below = 0  # starts of lower offsets are recorded first
        self.deliveries = DeliveryTimes()  # of an archived topic: delivery times of unsettled offsets
        self.excluded = ExcludedRecords(cut or {})
        self.parked = OwnedParkedKeys()  # (lock)
        self.to_park = ParkingQueue()  # (lock)
        self.spilled = SpilledQueues(self)  # (lock)
        self.committed = self.next_read = 0
        self.drain_until = float("inf")
        self.command: CommandRecord | None = None  # set once read: nothing follows

    @property
    def partition(self) -> PartitionId:
        """The partition's id."""
        return self.assignment.partition

    @property
    def epoch(self) -> int:
        """The assignment's epoch."""
        return self.assignment.epoch

    @property
    def is_settled(self) -> bool:
        """Whether everything before the command record is settled."""
        return self.command is not None and self.committed >= self.command.end

    @property
    def reach(self) -> int:
        """Offsets left in the ack bitmap."""
        return self.committed + BITMAP_REACH - self.next_read

    # -- life --------------------------------------------------------------------------------------------------------

    def open(self, lock: LockTaken) -> None:
        """(lock) Open a new partition at the former owner's position."""
        if self.state is OwnershipState.NEW:
            self.committed = lock.committed
            self.next_read = self.excluded.open(lock)
            self.attempts.open(lock)
            self.guarded_below = lock.guarded_below
            self.state = OwnershipState.OPEN

    def follow_replay(self, *, waits: bool) -> None:
        """Note that a replay holds newer messages back."""
        if waits != self.assignment.waits_for_replay:
            self.assignment = replace(self.assignment, waits_for_replay=waits)
        self.waits_for_replay = self.waits_for_replay or waits

    def replay_loaded(self) -> None:
        """Read on: its parked keys are loaded."""
        self.waits_for_replay = False

    def seal(self, command: CommandRecord) -> None:
        """Note the last record."""
        self.command = command

    def finish(self) -> None:
        """(lock) Start nothing more."""
        self.finished = True

    def drain(self, until: float) -> None:
        """(lock) Start nothing more; running handlers have until `until`."""
        self.drain_until, self.state = until, OwnershipState.DRAINING

    def drop(self) -> None:
        """(lock) Be gone."""
        self.state = OwnershipState.GONE

    # -- records -----------------------------------------------------------------------------------------------------

    def add(self, records: list[Record], last: int | None = None) -> list[KeyQueue]:
        """(lock) Queue records read up to `last`, or read again; return key queues that became ready."""
        if last is None:
            records = self.without_dead(records)
        else:
            records, following = self._handleable(records, last)
            self.next_read = max(self.next_read, following)
            if self.backlogs is not None:
                records = self.backlogs.admit(records, self.room.count, self.room.bytes)
        ready: list[KeyQueue] = []
        key_queues, backlogs = self.queues, self.backlogs
        size = admitted = 0
        ordered, parked = self.ordered, self.parked.by_name
        handled, guarded_below = self.handled, self.guarded_below
        for record in records:
            offset, m, key, body = record
            # Messages without a key wait for no other: each has its own key queue.
            name = key if ordered and key != NO_KEY else b"%b%d" % (NO_KEY, offset)
            key_queue = key_queues.get(name)
            if key_queue is None:
                key_queue = KeyQueue(name, [record], handled, (), None, self, guarded_below)
                key_queues[name] = key_queue
                if backlogs is not None:
                    key_queue.share = backlogs.share_of(record)
                if parked:
                    key_queue.parked_key = parked.get(self.parked_name(record))
                if key_queue.parked_key is None:
                    ready.append(key_queue)
                else:
                    self.to_park.add(key_queue)
            elif key_queue.spilled is None:
                key_queue.records.append(record)
            else:
                key_queue.spilled.append(offset)
                continue
            if key_queue.share is not None:
                key_queue.share.count(1)
            size += len(m) + len(key) + len(body)
            admitted += 1
        self.room.admit(admitted, size)
        return ready

    def _handleable(self, records: list[Record], last: int) -> tuple[list[Record], int]:
        records, following = self.excluded.unsettled(records, last)
        records, excluded = self.excluded.split(records)
        self.room.keep(excluded)
        self.results.settle(excluded)
        if self.parked.expected:
            self.parked.read({record.offset: self.parked_name(record) for record in records}, last)
        return records, following

    def add_unmatched(self, unmatched: Sequence[OffsetRange]) -> None:
        """(lock) Settle filtered offsets; call before `add`."""
        self.results.settle_unmatched(unmatched)
        if self.parked.expected:
            self.parked.exclude(unmatched)

    def parked_name(self, record: Record) -> bytes:
        """Return a message's name for parking."""
        if self.ordered and record.key != NO_KEY:
            # Called for every message while any key is parked; computing an identity would dominate its cost.
            return record.key
        return parked_name(record.key, record.identity, alone=True)

    def without_dead(self, records: list[Record]) -> list[Record]:
        """(lock) Settle the dead of reloaded records; return the others."""
        records, dead = self.excluded.split_dead(records)
        self.room.keep(dead)
        self.results.settle(dead)
        return records

    def skip_dead(self, key_queue: KeyQueue) -> None:
        """(lock) Settle a key queue's dead messages."""
        key_queue.records, dead = self.excluded.split_dead(key_queue.records)
        key_queue.count_waiting(-len(dead))
        self.results.settle(dead)

    def settled(self, records: Sequence[Record], committed: int) -> bool:
        """(lock) Free records; say whether a parked key became free."""
        self.committed = max(self.committed, committed)
        self.room.release(records)
        return bool(self.parked.by_offset) and self.parked.all_settled(records)

    # -- key queues --------------------------------------------------------------------------------------------------

    def begin(self, key_queue: KeyQueue, count: int) -> None:
        """(lock) Give a worker so many messages."""
        key_queue.begin(count)
        turn = key_queue.counts_for = key_queue.class_turn
        if turn is not None:
            turn.began(len(key_queue.batch))
        # A resumed key queue counts as running until its result is in Postgres.
        self.running += not key_queue.resumed

    def began(self, count: int = 1) -> None:
        """(lock) Count what the parking worker, or `begin_all`, gave out as running."""
        self.running += count

    def take_back(self, key_queue: KeyQueue) -> None:
        """(lock) Take a worker's part back."""
        key_queue.batch = ()
        self.running -= 1

    def end_empty(self, key_queues: Iterable[KeyQueue]) -> list[KeyQueue]:
        """(lock) Take workers' parts back and forget the queues that are without messages; return the others."""
        if self.state is not OwnershipState.OPEN:
            return list(key_queues)
        others: list[KeyQueue] = []
        forget, ended = self.queues.pop, 0
        for key_queue in key_queues:
            if (
                key_queue.records
                or key_queue.spilled is not None
                or key_queue.counts_for is not None
                or key_queue.resumed
            ):
                others.append(key_queue)
            else:
                key_queue.batch = ()
                ended += 1
                forget(key_queue.key, None)
        self.running -= ended
        return others

    def ended(self) -> bool:
        """(lock) Count one less; say whether nothing runs."""
        self.running -= 1
        return self.running == 0

    def forget(self, key_queue: KeyQueue) -> None:
        """(lock) Forget a key queue."""
        self.queues.pop(key_queue.key, None)


def begin_all(owned: OwnedPartition, key_queues: Iterable[KeyQueue]) -> list[KeyQueue]:
    """(lock) Give a worker all messages of a partition's key queues; return these."""
    begun: list[KeyQueue] = []
    running = 0
    for key_queue in key_queues:
        begun.append(key_queue)
        if key_queue.share is None and key_queue.class_turn is None and not key_queue.resumed:
            key_queue.batch, key_queue.records = key_queue.records, []
            running += 1
        else:
            owned.begin(key_queue, len(key_queue.records))
    owned.began(running)
    return begun


def key_queue_of(owned: OwnedPartition, key: bytes, record: Record) -> KeyQueue:
    """Return a key queue of one message."""
    return KeyQueue(key, [record], owned.handled, owned=owned, guarded_below=owned.guarded_below)


def parked_key_for(action: ParkKey, key_queue: KeyQueue, record: Record) -> OwnedParkedKey:
    """Return the parked key of a failed message."""
    ref = KeyRef(record.identity.lp, key_queue.owned.parked_name(record))
    due = NEVER if action.seconds is None else clock() + action.seconds
    entry = KeyEntry(ref, action.cause, action.seconds, action.attempts)
    return OwnedParkedKey(ref, attempts=action.attempts, due=due, entry=entry)


def resumed_queue(owned: OwnedPartition, parked_key: OwnedParkedKey, records: list[ParkedRecord]) -> KeyQueue:
    """Return a key queue of a parked key's messages."""
    key_queue = KeyQueue(
        parked_key.ref.name,
        [*records],
        deque(),
        owned=owned,
        guarded_below=EVERY_OFFSET if parked_key.died else 0,
        parked_key=parked_key,
        resumed=True,
    )
    parked_key.resume(key_queue, records[0].attempts, clock())
    return key_queue
