"""Parked keys in their owner's memory, under the dispatcher's lock.

A parked key is *entering* (not yet in Postgres) -> *waiting* -> *started* -> *waiting* or gone. Newly read messages of
it are parked too.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final

import msgspec

from mqlayer.consuming.engine.failure_actions import DeadLetter, FailureAction
from mqlayer.domain.message import Record
from mqlayer.domain.offsets import OffsetRange, covers
from mqlayer.parking import BATCH, KeyEntry, KeyRef, KeyState, ParkingLimit

NEVER: Final = float("inf")


class QueuedMessages(msgspec.Struct, eq=False):
    """One key's unhandled messages, in order; `batch` is a worker's part.

    Workers append to `handled`. `action`: why the first remaining message failed, for the parking worker.
    """

    key: bytes
    records: list[Record]
    handled: deque[Record]
    batch: Sequence[Record] = ()
    action: FailureAction | None = None

    def begin(self, count: int) -> None:
        """Give a worker its part: the first messages."""
        self.batch, self.records = self.records[:count], self.records[count:]

    def put_back(self, leftover: Sequence[Record]) -> None:
        """Put messages first again."""
        self.records[:0] = leftover


class OwnedParkedKey:
    """One parked key."""

    __slots__ = (
        "attempts",
        "died",
        "due",
        "entry",
        "full",
        "guarded_count",
        "probing",
        "queue",
        "ref",
        "resumed_at",
        "unsettled",
    )

    def __init__(self, ref: KeyRef, *, attempts: int = 0, due: float = NEVER, entry: KeyEntry | None = None) -> None:
        self.ref, self.attempts, self.due = ref, attempts, due
        # To be written to Postgres first; None: Postgres has the key.
        self.entry = entry
        # The workers' resumed key queue.
        self.queue: QueuedMessages | None = None
        # When workers got it.
        self.resumed_at = 0.0
        # Offsets that a former owner parked and may not have settled: handled now, they could be read again later.
        self.unsettled: set[int] = set()
        # The last reported limit that keeps its later messages in the stream.
        self.full: ParkingLimit | None = None
        # Its last messages found no room: a single one is read to test for it.
        self.probing = False
        # A former owner died in the middle, perhaps by chance: this many messages run singly, and are to blame if it
        # happens again.
        self.guarded_count = 0
        # It happened again: its first message has failed.
        self.died = False

    def has_capacity(self, *, more_waits: bool) -> None:
        """Note that its messages found room."""
        self.probing = False
        if not more_waits:
            self.full = None

    def has_no_capacity(self, limit: ParkingLimit) -> None:
        """Note that its messages found none."""
        self.full, self.probing = limit, True

    def written(self) -> None:
        """Note that Postgres has the key."""
        self.entry = None

    def resume(self, queue: QueuedMessages, attempts: int, now: float) -> None:
        """Note that workers have messages."""
        self.queue, self.attempts, self.resumed_at = queue, attempts, now

    def ended(self) -> None:
        """Note the end of what workers had."""
        if self.queue is not None:
            done = len(self.queue.handled) + isinstance(self.queue.action, DeadLetter)
            self.guarded_count = max(0, self.guarded_count - done)
        self.queue = None

    def wait(self, attempts: int) -> None:
        """Wait again."""
        self.queue, self.attempts, self.died = None, attempts, False

    @property
    def alone(self) -> bool:
        """Whether its first message runs alone: failed, or suspect."""
        return self.guarded_count > 0 or self.attempts > 0


class OwnedParkedKeys:
    """A partition's parked keys."""

    __slots__ = ("_due", "_due_now", "_order", "by_name", "by_offset", "expected")

    def __init__(self) -> None:
        self.by_name: dict[bytes, OwnedParkedKey] = {}
        # Offsets that a former owner parked and may not have settled; `expected`: those not yet read.
        self.by_offset: dict[int, OwnedParkedKey] = {}
        self.expected: set[int] = set()
        self._due: list[tuple[float, int, OwnedParkedKey]] = []
        self._due_now: dict[OwnedParkedKey, None] = {}
        self._order = count()

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def add(self, parked_key: OwnedParkedKey) -> None:
        """Add a key."""
        self.by_name[parked_key.ref.name] = parked_key
        self.schedule(parked_key, parked_key.due)

    def remove(self, parked_key: OwnedParkedKey) -> None:
        """Forget a key."""
        if self.by_name.get(parked_key.ref.name) is parked_key:
            del self.by_name[parked_key.ref.name]
        for offset in parked_key.unsettled:
            self.by_offset.pop(offset, None)
            self.expected.discard(offset)

    def follow(self, parked_key: OwnedParkedKey, there: OwnedParkedKey) -> None:
        """Take over what Postgres has of a key."""
        parked_key.attempts = there.attempts
        self.schedule(parked_key, there.due)

    def schedule(self, parked_key: OwnedParkedKey, due: float) -> None:
        """Set when a key is due."""
        parked_key.due = due
        if due < NEVER:
            heapq.heappush(self._due, (due, next(self._order), parked_key))

    def await_settling(self, parked_key: OwnedParkedKey, offset: int) -> None:
        """Hold a key until this offset is settled."""
        parked_key.unsettled.add(offset)
        self.by_offset[offset] = parked_key
        self.expected.add(offset)

    def settled(self, offset: int) -> bool:
        """Note a settled offset; say whether its key became free."""
        parked_key = self.by_offset.pop(offset, None)
        if parked_key is None:
            return False
        self.expected.discard(offset)
        parked_key.unsettled.discard(offset)
        return not parked_key.unsettled

    def all_settled(self, records: Iterable[Record]) -> bool:
        """Note settled records; say whether a key became free."""
        return sum([self.settled(record.offset) for record in records]) > 0

    def exclude(self, unmatched: Sequence[OffsetRange]) -> None:
        """Expect filtered offsets no longer."""
        self.expected = {offset for offset in self.expected if not covers(unmatched, offset)}

    def all_unmatched(self, unmatched: Sequence[OffsetRange]) -> bool:
        """Note settled ranges; say whether a key became free."""
        return sum([self.settled(offset) for offset in list(self.by_offset) if covers(unmatched, offset)]) > 0

    def queues(self) -> list[QueuedMessages]:
        """Return the workers' resumed key queues."""
        return [parked_key.queue for parked_key in self.by_name.values() if parked_key.queue is not None]

    def read(self, name_at: dict[int, bytes], last: int) -> None:
        """Note reads up to `last`; earlier missing messages never come."""
        for offset in [offset for offset in self.expected if offset <= last]:
            self.expected.discard(offset)
            parked_key = self.by_offset[offset]
            if name_at.get(offset) != parked_key.ref.name:
                self.settled(offset)

    def due_now(self, now: float) -> list[OwnedParkedKey]:
        """Return due keys, earliest first; repeated until taken."""
        while self._due and self._due[0][0] <= now:
            due, _, parked_key = heapq.heappop(self._due)
            if parked_key.due == due and self.by_name.get(parked_key.ref.name) is parked_key:
                self._due_now[parked_key] = None
        # Drop rescheduled and removed keys.
        self._due_now = {p: None for p in self._due_now if p.due <= now and self.by_name.get(p.ref.name) is p}
        return list(self._due_now)

    @property
    def has_due(self) -> bool:
        """Whether due keys wait to start."""
        return bool(self._due_now)

    def take_due(self, parked_keys: list[OwnedParkedKey]) -> None:
        """Take keys off the due ones."""
        for parked_key in parked_keys:
            del self._due_now[parked_key]

    def next_due(self) -> float:
        """Return the next due time, or NEVER."""
        return self._due[0][0] if self._due else NEVER


def parked_key_of(state: KeyState, now: float, *, own_epoch: int | None = None) -> OwnedParkedKey:
    """Return a loaded parked key; a start under `own_epoch` is this owner's."""
    due = NEVER if state.due_in_s is None else now + state.due_in_s
    parked_key = OwnedParkedKey(state.ref, attempts=state.attempts, due=due)
    if state.started is not None and state.started != own_epoch:
        parked_key.guarded_count, parked_key.died = BATCH, state.started_alone
    return parked_key
