"""What a member holds: partitions under an epoch, and in each the lanes of its keys.

States of a holding: *new* (assigned, pull lock not taken) -> *open* -> *draining* (nothing is started any more) ->
*gone* (released, fenced or lost). Only *open* starts messages. A lane is one key's line of unsettled messages:
*waiting* (in the ready line), *running* (one worker has it), *delayed* (its head failed). At most one worker has a
lane, so at most one message of a key is under way (invariant 11).
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

from mqlayer.domain.message import NO_KEY, Record
from mqlayer.domain.offsets import settled_above
from mqlayer.membership.members import Assigned
from mqlayer.redis.partitions import Holder, Taken

BITMAP_REACH = 1_000_000
"""How far beyond committed a member reads: less than the window of offsets_settle (1,048,576 offsets)."""


class State(Enum):
    """Where a holding stands."""

    NEW = auto()
    OPEN = auto()
    DRAINING = auto()
    GONE = auto()


class Lane:
    """One key's messages that are read and not handled, in order; `batch` is what a worker has in hand."""

    __slots__ = ("batch", "held", "key", "records")

    def __init__(self, held: Held, key: bytes, record: Record) -> None:
        self.held, self.key = held, key
        self.records = [record]
        self.batch: list[Record] = []


class Held:
    """One partition under one epoch. Fields marked (lock) change under the member's lock only."""

    __slots__ = (
        "assigned",
        "attempts",
        "busy",
        "bytes_in_hand",
        "committed",
        "count_in_hand",
        "drain_until",
        "failed",
        "holder",
        "lanes",
        "next_read",
        "record_bytes",
        "settled",
        "settled_before",
        "state",
    )

    def __init__(self, assigned: Assigned, holder: Holder) -> None:
        self.assigned, self.holder = assigned, holder
        self.state = State.NEW
        self.lanes: dict[bytes, Lane] = {}  # (lock)
        self.busy = 0  # (lock) lanes that workers have in hand
        self.count_in_hand = 0  # (lock) read and not acknowledged as settled
        self.bytes_in_hand = 0  # (lock)
        self.settled: deque[Record] = deque()  # handled; appended by workers, taken one by one by the settler
        self.failed: deque[int] = deque()  # offsets whose failed attempt is to be counted; likewise
        self.attempts: dict[int, int] = {}
        self.settled_before: set[int] = set()
        self.committed = self.next_read = 0
        self.record_bytes = 1024.0
        self.drain_until = float("inf")

    @property
    def partition(self) -> int:
        """The partition's id."""
        return self.assigned.partition

    @property
    def epoch(self) -> int:
        """The epoch it is held under."""
        return self.assigned.epoch

    def start_at(self, taken: Taken) -> None:
        """Go on where the former owner stopped: from committed, without what is settled above it."""
        self.committed = self.next_read = taken.committed
        self.settled_before = settled_above(taken.committed, taken.base, taken.bits)
        self.attempts = taken.attempts
        self.state = State.OPEN

    def admit(self, records: list[Record]) -> list[Lane]:
        """Put new records (one at the least) into their lanes; return those that got ready. Call under the lock."""
        ready: list[Lane] = []
        lanes, last = self.lanes, records[-1].offset
        if self.settled_before:
            records = self._without_settled(records)
        size = 0
        for record in records:
            offset, m, key, body = record
            size += len(m) + len(key) + len(body)
            if key == NO_KEY:
                # Messages without a key wait for nobody: each has a lane of its own.
                key += b"%d" % offset
            lane = lanes.get(key)
            if lane is None:
                lanes[key] = lane = Lane(self, key, record)
                ready.append(lane)
            else:
                lane.records.append(record)
        self.count_in_hand += len(records)
        self.bytes_in_hand += size
        self.next_read = last + 1
        self.record_bytes = max(size / max(1, len(records)), 0.9 * self.record_bytes)
        return ready

    def _without_settled(self, records: list[Record]) -> list[Record]:
        """Leave out what the former owner settled above committed."""
        before = self.settled_before
        kept = [record for record in records if record.offset not in before]
        before.difference_update(record.offset for record in records)
        return kept

    def room(self, count_share: int, bytes_share: int) -> int:
        """Return how many more records may be read: bounded by count, by bytes, and by the ack bitmap's reach."""
        by_bytes = int((bytes_share - self.bytes_in_hand) / max(self.record_bytes, 1.0))
        by_reach = self.committed + BITMAP_REACH - self.next_read
        room = min(count_share - self.count_in_hand, by_bytes, by_reach)
        # One record is always allowed into an empty hand, however large it is.
        return max(room, 1 if self.count_in_hand == 0 else 0)
