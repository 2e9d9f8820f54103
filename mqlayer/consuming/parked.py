"""Parked keys in their owner's memory.

States of a parking: *entering* (a handler failed; the server does not know it yet) -> *waiting* -> *started* (workers
have its first messages, from Postgres) -> *waiting*, or gone. While it is there, what is read of its key goes to the
keeper, which parks it too, and not to the workers. All fields change under the dispatcher's lock only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Final

from mqlayer.domain.message import Record
from mqlayer.domain.offsets import Range, covers
from mqlayer.parking import BATCH, KeyEntry, KeyRef, KeyState, ParkingLimit

if TYPE_CHECKING:
    from mqlayer.consuming.holdings import Lane

NEVER: Final = float("inf")


class Parking:
    """One parked key of a holding."""

    __slots__ = ("attempts", "careful", "died", "due", "entry", "full", "given", "lane", "ref", "tight", "unsettled")

    def __init__(self, ref: KeyRef, *, attempts: int = 0, due: float = NEVER, entry: KeyEntry | None = None) -> None:
        self.ref, self.attempts, self.due = ref, attempts, due
        # What the server is to be told first; None: it knows the key.
        self.entry = entry
        # What workers have of it.
        self.lane: Lane | None = None
        # When they got that.
        self.given = 0.0
        # Offsets that a former owner parked and may not have settled: handled now, they could come once more later.
        self.unsettled: set[int] = set()
        # The limit that keeps what follows of it in the stream, as was said last.
        self.full: ParkingLimit | None = None
        # What was read of it last found no room: one message is read to see whether there is some.
        self.tight = False
        # Somebody ended in the middle of it, perhaps by chance: so many of its messages are handled one by one from
        # here, and to blame if that happens again.
        self.careful = 0
        # It did: nobody ever said how its first message ended. A failed attempt.
        self.died = False

    def has_room(self, *, more_waits: bool) -> None:
        """Note that what was read of it found room; with nothing more that waits, the next lack of it is news."""
        self.tight = False
        if not more_waits:
            self.full = None

    @property
    def alone(self) -> bool:
        """Whether its first message is handled by itself: it failed before, or may have killed its consumer."""
        return self.careful > 0 or self.attempts > 0


class Parkings:
    """All parked keys of a holding, by name."""

    __slots__ = ("_due", "_order", "_ripe", "by_name", "by_offset", "expected")

    def __init__(self) -> None:
        self.by_name: dict[bytes, Parking] = {}
        # Offsets that a former owner parked and may not have settled; those of them that were not read as yet.
        self.by_offset: dict[int, Parking] = {}
        self.expected: set[int] = set()
        self._due: list[tuple[float, int, Parking]] = []
        self._ripe: dict[Parking, None] = {}
        self._order = count()

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def add(self, parking: Parking) -> None:
        """Add a key."""
        self.by_name[parking.ref.name] = parking
        self.schedule(parking, parking.due)

    def remove(self, parking: Parking) -> None:
        """Forget a key."""
        if self.by_name.get(parking.ref.name) is parking:
            del self.by_name[parking.ref.name]
        for offset in parking.unsettled:
            self.by_offset.pop(offset, None)
            self.expected.discard(offset)

    def schedule(self, parking: Parking, due: float) -> None:
        """Have a key tried at a time."""
        parking.due = due
        if due < NEVER:
            heapq.heappush(self._due, (due, next(self._order), parking))

    def await_settling(self, parking: Parking, offset: int) -> None:
        """Note that an offset of a former owner's may not be settled."""
        parking.unsettled.add(offset)
        self.by_offset[offset] = parking
        self.expected.add(offset)

    def settled(self, offset: int) -> bool:
        """Note that an offset is settled; say whether that was the last one its key waited for."""
        parking = self.by_offset.pop(offset, None)
        if parking is None:
            return False
        self.expected.discard(offset)
        parking.unsettled.discard(offset)
        return not parking.unsettled

    def all_settled(self, records: Iterable[Record]) -> bool:
        """Note that records are settled; say whether some key need not wait for that any more."""
        return sum([self.settled(record.offset) for record in records]) > 0

    def leave_out(self, unmatched: Sequence[Range]) -> None:
        """Note that offsets were read and left out by the group's filter: they don't come, and are to be settled."""
        self.expected = {offset for offset in self.expected if not covers(unmatched, offset)}

    def all_left_out(self, unmatched: Sequence[Range]) -> bool:
        """Note that ranges are settled; say whether some key need not wait for that any more."""
        return sum([self.settled(offset) for offset in list(self.by_offset) if covers(unmatched, offset)]) > 0

    def lanes(self) -> list[Lane]:
        """Return what workers have of parked keys."""
        return [parking.lane for parking in self.by_name.values() if parking.lane is not None]

    def read(self, name_at: dict[int, bytes], last: int) -> None:
        """Note what was read up to an offset: an expected one that is another message now, or gone, never comes."""
        for offset in [offset for offset in self.expected if offset <= last]:
            self.expected.discard(offset)
            parking = self.by_offset[offset]
            if name_at.get(offset) != parking.ref.name:
                self.settled(offset)

    def ripe(self, now: float) -> list[Parking]:
        """Return the keys that are due, each once, the first one first; ask again for those that can't be started."""
        while self._due and self._due[0][0] <= now:
            due, _, parking = heapq.heappop(self._due)
            if parking.due == due and self.by_name.get(parking.ref.name) is parking:
                self._ripe[parking] = None
        # Rescheduled or gone meanwhile.
        self._ripe = {p: None for p in self._ripe if p.due <= now and self.by_name.get(p.ref.name) is p}
        return list(self._ripe)

    @property
    def has_ripe(self) -> bool:
        """Whether keys were due that could not be started."""
        return bool(self._ripe)

    def take_ripe(self, parkings: list[Parking]) -> None:
        """Take keys off those that are due."""
        for parking in parkings:
            del self._ripe[parking]

    def next_due(self) -> float:
        """Return when the next key is due, as far as is known; NEVER where none is."""
        return self._due[0][0] if self._due else NEVER


def parking_of(state: KeyState, now: float, *, own_epoch: int | None = None) -> Parking:
    """Return a parked key as the server has it. `own_epoch`: that somebody began with it under this one means us."""
    due = NEVER if state.due_in_s is None else now + state.due_in_s
    parking = Parking(state.ref, attempts=state.attempts, due=due)
    if state.started is not None and state.started != own_epoch:
        parking.careful, parking.died = BATCH, state.started_alone
    return parking
