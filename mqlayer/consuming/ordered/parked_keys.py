"""Parked keys in their owner's memory.

States of a parking: *entering* (a handler failed; the server does not know it yet) -> *waiting* -> *started* (workers
have its first messages, from Postgres) -> *waiting*, or gone. While it is there, what is read of its key goes to the
parking worker, which parks it too, and not to the workers. All fields change under the dispatcher's lock only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Final

from mqlayer.domain.message import Record
from mqlayer.domain.offsets import OffsetRange, covers
from mqlayer.parking import BATCH, KeyEntry, KeyRef, KeyState, ParkingLimit

if TYPE_CHECKING:
    from mqlayer.consuming.ordered.owned_partitions import KeyQueue

NEVER: Final = float("inf")


class OwnedParkedKey:
    """One parked key of an owned partition."""

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
        # What the server is to be told first; None: it knows the key.
        self.entry = entry
        # What workers have of it.
        self.queue: KeyQueue | None = None
        # When they got that.
        self.resumed_at = 0.0
        # Offsets that a former owner parked and may not have settled: handled now, they could come once more later.
        self.unsettled: set[int] = set()
        # The limit that keeps what follows of it in the stream, as was said last.
        self.full: ParkingLimit | None = None
        # What was read of it last found no room: one message is read to see whether there is some.
        self.probing = False
        # Somebody ended in the middle of it, perhaps by chance: so many of its messages are handled one by one from
        # here, and to blame if that happens again.
        self.guarded_count = 0
        # It did: nobody ever said how its first message ended. A failed attempt.
        self.died = False

    def has_capacity(self, *, more_waits: bool) -> None:
        """Note that what was read of it found room; with nothing more that waits, the next lack of it is news."""
        self.probing = False
        if not more_waits:
            self.full = None

    @property
    def alone(self) -> bool:
        """Whether its first message is handled by itself: it failed before, or may have killed its consumer."""
        return self.guarded_count > 0 or self.attempts > 0


class OwnedParkedKeys:
    """All parked keys of an owned partition, by name."""

    __slots__ = ("_due", "_due_now", "_order", "by_name", "by_offset", "expected")

    def __init__(self) -> None:
        self.by_name: dict[bytes, OwnedParkedKey] = {}
        # Offsets that a former owner parked and may not have settled; those of them that were not read as yet.
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

    def schedule(self, parked_key: OwnedParkedKey, due: float) -> None:
        """Have a key tried at a time."""
        parked_key.due = due
        if due < NEVER:
            heapq.heappush(self._due, (due, next(self._order), parked_key))

    def await_settling(self, parked_key: OwnedParkedKey, offset: int) -> None:
        """Note that an offset of a former owner's may not be settled."""
        parked_key.unsettled.add(offset)
        self.by_offset[offset] = parked_key
        self.expected.add(offset)

    def settled(self, offset: int) -> bool:
        """Note that an offset is settled; say whether that was the last one its key waited for."""
        parked_key = self.by_offset.pop(offset, None)
        if parked_key is None:
            return False
        self.expected.discard(offset)
        parked_key.unsettled.discard(offset)
        return not parked_key.unsettled

    def all_settled(self, records: Iterable[Record]) -> bool:
        """Note that records are settled; say whether some key need not wait for that any more."""
        return sum([self.settled(record.offset) for record in records]) > 0

    def exclude(self, unmatched: Sequence[OffsetRange]) -> None:
        """Note that offsets were read and left out by the group's filter: they don't come, and are to be settled."""
        self.expected = {offset for offset in self.expected if not covers(unmatched, offset)}

    def all_unmatched(self, unmatched: Sequence[OffsetRange]) -> bool:
        """Note that ranges are settled; say whether some key need not wait for that any more."""
        return sum([self.settled(offset) for offset in list(self.by_offset) if covers(unmatched, offset)]) > 0

    def queues(self) -> list[KeyQueue]:
        """Return what workers have of parked keys."""
        return [parked_key.queue for parked_key in self.by_name.values() if parked_key.queue is not None]

    def read(self, name_at: dict[int, bytes], last: int) -> None:
        """Note what was read up to an offset: an expected one that is another message now, or gone, never comes."""
        for offset in [offset for offset in self.expected if offset <= last]:
            self.expected.discard(offset)
            parked_key = self.by_offset[offset]
            if name_at.get(offset) != parked_key.ref.name:
                self.settled(offset)

    def due_now(self, now: float) -> list[OwnedParkedKey]:
        """Return the keys that are due, each once, the first one first; ask again for those that can't be started."""
        while self._due and self._due[0][0] <= now:
            due, _, parked_key = heapq.heappop(self._due)
            if parked_key.due == due and self.by_name.get(parked_key.ref.name) is parked_key:
                self._due_now[parked_key] = None
        # Rescheduled or gone meanwhile.
        self._due_now = {p: None for p in self._due_now if p.due <= now and self.by_name.get(p.ref.name) is p}
        return list(self._due_now)

    @property
    def has_due(self) -> bool:
        """Whether keys were due that could not be started."""
        return bool(self._due_now)

    def take_due(self, parked_keys: list[OwnedParkedKey]) -> None:
        """Take keys off those that are due."""
        for parked_key in parked_keys:
            del self._due_now[parked_key]

    def next_due(self) -> float:
        """Return when the next key is due, as far as is known; NEVER where none is."""
        return self._due[0][0] if self._due else NEVER


def parked_key_of(state: KeyState, now: float, *, own_epoch: int | None = None) -> OwnedParkedKey:
    """Return a parked key as the server has it. `own_epoch`: that somebody began with it under this one means us."""
    due = NEVER if state.due_in_s is None else now + state.due_in_s
    parked_key = OwnedParkedKey(state.ref, attempts=state.attempts, due=due)
    if state.started is not None and state.started != own_epoch:
        parked_key.guarded_count, parked_key.died = BATCH, state.started_alone
    return parked_key
