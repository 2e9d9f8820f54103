"""What a member holds: partitions under an epoch, and in each the lanes of its keys.

States of a holding: *new* (assigned, pull lock not taken) -> *open* -> *draining* (nothing is started any more) ->
*gone* (released, fenced or lost). Only *open* starts messages. A lane is one key's line of unsettled messages:
*waiting* (in the ready line), *running* (one worker has it), *delayed* (its head failed), *folded* (what waits behind
the head is to be read again). At most one worker has a lane, so at most one message of a key is under way
(invariant 11). A lane of a parked key goes to the keeper instead of the workers, who have the key's first messages in
a lane of their own, *resumed* from Postgres.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto

from mqlayer.consuming.clock import clock
from mqlayer.consuming.parked import NEVER, Parking, Parkings
from mqlayer.consuming.reads import Reads
from mqlayer.consuming.verdicts import Park, Verdict
from mqlayer.domain.message import NO_KEY, CommandRecord, Identity, ParkedRecord, Record
from mqlayer.domain.offsets import Range, first_unsettled, is_settled
from mqlayer.domain.parking import parked_name
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.membership.members import Assigned
from mqlayer.parking import Burial, KeyEntry, KeyRef
from mqlayer.redis.partitions import Holder, Taken

BITMAP_REACH = 1_000_000
"""How far beyond committed a member reads: less than the window of offsets_settle (1,048,576 offsets)."""


EVERY_OFFSET = 1 << 62


class State(Enum):
    """Where a holding stands."""

    NEW = auto()
    OPEN = auto()
    DRAINING = auto()
    GONE = auto()


class Start:
    """A message that is to be started with care: its worker waits until the server knows."""

    __slots__ = ("alone", "noted", "offset")

    def __init__(self, offset: int, *, alone: bool) -> None:
        self.offset, self.alone = offset, alone
        self.noted = threading.Event()


class Lane:
    """One key's messages that are not handled, in order. `batch` is what a worker has in hand.

    `later` holds the offsets of what follows `records` while the lane is folded: a failing key's backlog must not fill
    the bounds that all keys share. None: the lane is not folded.
    """

    __slots__ = (
        "batch", "caution", "held", "key", "later", "line", "parking", "records", "resumed", "since", "singly",
        "unsure", "verdict",
    )  # fmt: skip

    def __init__(self, held: Held, key: bytes, record: Record) -> None:
        self.held, self.key = held, key
        self.records = [record]
        self.batch: Sequence[Record] = ()
        self.later: array[int] | None = None
        # Where workers put what they have handled.
        self.line: deque[Record] = held.settled
        # Offsets below are started with care: one of them may have killed the former owners.
        self.caution = held.caution
        # Of batch handlers: offsets below are given to them one by one, and since when the lane waits for a worker.
        self.singly, self.since = 0, 0.0
        # Set while its key is parked.
        self.parking: Parking | None = None
        # So many of its first messages may be parked already: the answer to that did not come.
        self.unsure = 0
        self.resumed = False
        # Why the first message that it has left failed, for the keeper.
        self.verdict: Verdict | None = None


class Held:
    """One partition under one epoch. Fields marked (lock) change under the dispatcher's lock only."""

    __slots__ = (
        "asleep",
        "assigned",
        "attempts",
        "busy",
        "bytes_in_hand",
        "caution",
        "command",
        "committed",
        "count_in_hand",
        "cut",
        "dead",
        "died",
        "drain_until",
        "failed",
        "failing_since",
        "finished",
        "folded",
        "followed",
        "full",
        "holder",
        "lanes",
        "next_read",
        "noted",
        "ordered",
        "parked",
        "passed",
        "reads",
        "record_bytes",
        "resting",
        "settled",
        "settled_before",
        "starts",
        "state",
        "suspects",
        "to_bury",
        "to_park",
        "to_refill",
        "unmatched",
        "unsure",
    )

    def __init__(self, assigned: Assigned, holder: Holder, *, ordered: bool = True) -> None:
        self.assigned, self.holder, self.ordered = assigned, holder, ordered
        self.state = State.NEW
        # Nothing is read of its stream: a replay has newer messages wait. Until the keeper knows what that has parked.
        self.resting = assigned.resting
        self.lanes: dict[bytes, Lane] = {}  # (lock)
        self.busy = 0  # (lock) lanes that workers have in hand
        self.count_in_hand = 0  # (lock) read and not acknowledged as settled
        self.bytes_in_hand = 0  # (lock)
        self.folded = 0  # (lock) lanes that are folded
        self.full = False  # nothing is read of it at present, for lack of room; by its reader
        self.asleep = 0  # (lock) folded lanes that wait for their backoff
        self.to_refill: deque[Lane] = deque()  # (lock) folded lanes that are due, to be read again
        self.settled: deque[Record] = deque()  # handled; appended by workers, taken one by one by the settler
        # To be settled without being handled from here: parked, dead, or another partition's; likewise.
        self.passed: deque[Record] = deque()
        # Offsets that the group's filter leaves out, to be settled as they are; likewise.
        self.unmatched: deque[Range] = deque()
        self.failed: deque[tuple[int, int]] = deque()  # offset and its failed attempts, to be counted; likewise
        self.reads = Reads()  # of an archived topic: when what is not settled was given to us
        self.attempts: dict[int, int] = {}
        self.failing_since: dict[int, float] = {}  # offset -> when it failed first, here
        self.parked = Parkings()  # (lock)
        self.followed = 0  # how many of others' acts on parked keys it knows, for the keeper
        self.to_park: deque[Lane] = deque()  # (lock) lanes of parked keys that hold messages
        self.unsure = False  # some of these may be parked already; for the keeper
        self.to_bury: deque[tuple[Lane, Burial]] = deque()  # (lock) lanes whose first message leaves the group
        self.dead: set[Identity] = set()  # left the group, and may come once more
        self.finished = False  # (lock) nothing is started here any more: its successors go on
        self.caution = 0  # offsets below are started with care
        self.starts: deque[Start] = deque()  # to be noted before a worker begins, by the settler
        self.noted: set[int] = set()  # of these, those that the server knows as started, and nothing failed since
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
        return self.assigned.partition

    @property
    def epoch(self) -> int:
        """The epoch it is held under."""
        return self.assigned.epoch

    def start_at(self, taken: Taken) -> None:
        """Go on where the former owner stopped: from committed, without what is settled above it."""
        self.committed = taken.committed
        self.settled_before = (taken.base, taken.bits) if taken.bits else None
        self.next_read = first_unsettled(taken.committed, taken.base, taken.bits)
        self.attempts = taken.attempts
        self.caution, self.suspects, self.died = taken.caution, set(taken.suspects), set(taken.died)
        self.state = State.OPEN

    def admit(self, records: list[Record], last: int) -> list[Lane]:
        """Put new records, read up to an offset, into their lanes; return those that got ready. Call under the lock."""
        ready: list[Lane] = []
        lanes = self.lanes
        records = self._handleable(records, last)
        size = kept = 0
        ordered, parked = self.ordered, self.parked
        for record in records:
            offset, m, key, body = record
            # Messages without a key wait for nobody: each has a lane of its own.
            name = key if ordered and key != NO_KEY else b"%b%d" % (NO_KEY, offset)
            lane = lanes.get(name)
            if lane is None:
                lanes[name] = lane = Lane(self, name, record)
                if parked:
                    lane.parking = parked.by_name.get(self.parked_name(record))
                (ready if lane.parking is None else self.to_park).append(lane)
            elif lane.later is None:
                lane.records.append(record)
            else:
                lane.later.append(offset)
                continue
            size += len(m) + len(key) + len(body)
            kept += 1
        self.count_in_hand += kept
        self.bytes_in_hand += size
        self.next_read = max(self.next_read, last + 1)
        if kept:
            self.record_bytes = max(size / kept, 0.9 * self.record_bytes)
        return ready

    def leave_out(self, unmatched: Sequence[Range]) -> None:
        """Have offsets settled that the group's filter leaves out; admit what was read beside them after this."""
        self.unmatched.extend(unmatched)
        if self.parked.expected:
            self.parked.leave_out(unmatched)

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
        rest: list[Record] = []
        passed: list[Record] = []
        for record in records:
            (passed if passed_over(record) else rest).append(record)
        self.count_in_hand += len(passed)
        self.bytes_in_hand += sum(map(size_of, passed))
        self.passed.extend(passed)
        return rest

    def pass_over_dead(self, lane: Lane) -> None:
        """Take as settled what died of a lane since it was read. Call under the lock."""
        if self.dead:
            dead = [record for record in lane.records if self._is_dead(record)]
            lane.records = [record for record in lane.records if not self._is_dead(record)]
            self.passed.extend(dead)

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

    def fold(self, lane: Lane) -> None:
        """Keep of a failing lane the offsets only; it still counts as one in hand. Call under the lock."""
        if lane.later is None:
            lane.later = array("q")
            self.folded += 1
        lane.later[:0] = array("q", [record.offset for record in lane.records])
        self.let_go(lane.records)
        self.count_in_hand += 1
        lane.records = []

    def end_or_unfold(self, lane: Lane) -> None:
        """Nothing that was read is left of a lane. Call under the lock."""
        if lane.later is None:
            del self.lanes[lane.key]
        else:
            self.unfold(lane)

    def unfold(self, lane: Lane) -> None:
        """A folded lane has nothing in memory any more: have it filled again, or end it. Call under the lock."""
        if lane.later:
            self.count_in_hand += 1
            self.to_refill.append(lane)
        else:
            self.folded -= 1
            del self.lanes[lane.key]

    def refill(self, lane: Lane, records: list[Record], asked: int) -> None:
        """Put back what was read again of the first `asked` offsets of a folded lane. Call under the lock."""
        later = lane.later or array("q")
        del later[:asked]
        if self.dead:
            # It may have died since it was read first.
            records = self._without(records, self._is_dead)
        lane.records = records
        self.count_in_hand += len(records) - 1
        self.bytes_in_hand += sum(map(size_of, records))
        if not records:
            self.unfold(lane)
        elif not later:
            lane.later = None
            self.folded -= 1

    def let_go(self, records: list[Record]) -> None:
        """Make room: these are not in hand any more. Call under the lock."""
        self.count_in_hand -= len(records)
        self.bytes_in_hand -= sum(map(size_of, records))

    def room(self, count_share: int, bytes_share: int, read_count: int) -> int:
        """Return how many records to read now, by count, by bytes and by reach; 0 where that is not worth a read.

        A failing key takes no room from others by bytes, and one by count, however much waits behind it.
        """
        by_bytes = int((bytes_share - self.bytes_in_hand) / self.record_bytes)
        room = min(count_share - self.count_in_hand, by_bytes, self.reach)
        others = count_share - self.folded
        if self.count_in_hand <= self.folded:
            # One record is always allowed into an empty hand, however large it is.
            room = max(room, min(1, self.reach, others))
        # A quarter of what may be in hand at the least: no reads of one record at a time.
        enough = min(others, int(bytes_share / self.record_bytes)) // 4
        return room if room >= min(max(1, enough), read_count) else 0

    @property
    def is_settled(self) -> bool:
        """Whether everything before the command record is settled, by the server's word."""
        return self.command is not None and self.committed >= self.command.end

    @property
    def reach(self) -> int:
        """How many offsets the ack bitmap still takes beyond what was read."""
        return self.committed + BITMAP_REACH - self.next_read


class Holdings:
    """All that a member holds, by partition; for any of its threads."""

    def __init__(self) -> None:
        self._by_partition: dict[PartitionId, Held] = {}
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._by_partition)

    def all(self) -> list[Held]:
        """Return every holding."""
        with self._changed:
            return list(self._by_partition.values())

    def on(self, node_id: NodeId) -> list[Held]:
        """Return the holdings on one node."""
        with self._changed:
            return [held for held in self._by_partition.values() if held.assigned.node == node_id]

    def get(self, partition: PartitionId) -> Held | None:
        """Return the holding of a partition."""
        with self._changed:
            return self._by_partition.get(partition)

    def add(self, held: Held) -> bool:
        """Add a holding; False once they are closed."""
        with self._changed:
            if not self._closed:
                self._by_partition[held.partition] = held
            return not self._closed

    def remove(self, held: Held) -> None:
        """Remove this very holding; a later one of the partition stays."""
        with self._changed:
            if self._by_partition.get(held.partition) is held:
                del self._by_partition[held.partition]
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


def parking_by(verdict: Park, lane: Lane, record: Record) -> Parking:
    """Return the parking of a lane's key, whose message failed."""
    ref = KeyRef(record.identity.lp, lane.held.parked_name(record))
    due = NEVER if verdict.seconds is None else clock() + verdict.seconds
    entry = KeyEntry(ref, verdict.cause, verdict.seconds, verdict.attempts)
    return Parking(ref, attempts=verdict.attempts, due=due, entry=entry)


def resumed_lane(held: Held, parking: Parking, records: list[ParkedRecord]) -> Lane:
    """Return a lane with messages of a parked key that are to be handled now."""
    lane = Lane(held, parking.ref.name, records[0])
    lane.records = [*records]
    lane.line = deque()
    lane.parking, lane.resumed = parking, True
    parking.given = clock()
    lane.caution = EVERY_OFFSET if parking.died else 0
    parking.lane = lane
    return lane
