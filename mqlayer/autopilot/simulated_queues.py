"""Queues of a simulated topic: arrivals, partitions, and what members take of them. Pure.

Arrivals of a slot can be handled in it. A queue is handled in order; a hot key's queue by one worker at a time.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, NamedTuple

OTHER_KEYS: Final = -1
"""In place of a hot key's number."""


class ArrivalCell(NamedTuple):
    """Messages of an LP in a slot: of one hot key (its number), or of all others."""

    slot: int
    lp: int
    key: int
    messages: int


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A topic's messages per slot and LP, in arrays: 12 bytes per cell. `keys`: the hot ones."""

    began: datetime
    slot_s: float
    keys: Sequence[str]
    _firsts: array[int]
    _lps: array[int]
    _keys: array[int]
    _messages: array[int]

    @classmethod
    def of(cls, began: datetime, slot_s: float, keys: Sequence[str], cells: Iterable[ArrivalCell]) -> Arrivals:
        """Return arrivals from cells in the order of their slots."""
        firsts, lps, numbers, messages = array("q", [0]), array("h"), array("h"), array("q")
        for cell in cells:
            while len(firsts) <= cell.slot:
                firsts.append(len(lps))
            lps.append(cell.lp)
            numbers.append(cell.key)
            messages.append(cell.messages)
        firsts.append(len(lps))
        return cls(began, slot_s, keys, firsts, lps, numbers, messages)

    @property
    def slots(self) -> int:
        """How many there are."""
        return len(self._firsts) - 1

    @property
    def messages(self) -> int:
        """All of them."""
        return sum(self._messages)

    def at(self, slot: int) -> Iterator[tuple[int, int, int]]:
        """Return a slot's LPs, hot keys' numbers, and messages."""
        cells = slice(self._firsts[slot], self._firsts[slot + 1])
        return zip(self._lps[cells], self._keys[cells], self._messages[cells], strict=True)

    def time_of(self, slot: int) -> datetime:
        """Return when a slot begins."""
        return self.began + timedelta(seconds=slot * self.slot_s)

    def per_lp(self) -> Counter[int]:
        """Return all messages per LP."""
        found: Counter[int] = Counter()
        for lp, messages in zip(self._lps, self._messages, strict=True):
            found[lp] += messages
        return found


@dataclass(slots=True)
class SimulatedQueue:
    """Messages in order, as [slot, messages]. `credit`: what a hot key's one worker can handle now."""

    chunks: deque[list[int]] = field(default_factory=deque)
    backlog: int = 0
    credit: float = 0.0

    def add(self, slot: int, messages: int) -> None:
        """Append messages of a slot."""
        if self.chunks and self.chunks[-1][0] == slot:
            self.chunks[-1][1] += messages
        else:
            self.chunks.append([slot, messages])
        self.backlog += messages

    def take(self, most: int) -> tuple[int, int]:
        """Take messages of the oldest slot; return it and how many."""
        head = self.chunks[0]
        taken = min(most, head[1])
        head[1] -= taken
        self.backlog -= taken
        self.credit -= taken
        if not head[1]:
            self.chunks.popleft()
        return head[0], taken


@dataclass(slots=True, eq=False)
class SimulatedPartition:
    """A partition with its queues. `parents`: those not yet drained; `per_key`: messages of a key in one slot."""

    number: int
    lp_from: int
    lp_to: int
    born: int
    per_key: float
    parents: tuple[SimulatedPartition, ...] = ()
    is_open: bool = True
    arrived: int = 0
    served: int = 0
    queues: dict[int, SimulatedQueue] = field(default_factory=dict)

    @property
    def backlog(self) -> int:
        """Messages left."""
        return self.arrived - self.served

    @property
    def is_drained(self) -> bool:
        """Whether it is sealed and empty."""
        return not self.is_open and not self.backlog

    @property
    def oldest(self) -> int | None:
        """The slot of its oldest message."""
        return min((queue.chunks[0][0] for queue in self.queues.values() if queue.chunks), default=None)

    def add(self, slot: int, key: int, messages: int) -> None:
        """Append messages of a hot key, or of all others."""
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = SimulatedQueue()
        queue.add(slot, messages)
        self.arrived += messages

    def refresh(self) -> int:
        """Begin a slot; return the most that can be taken in it."""
        able = 0
        for key, queue in self.queues.items():
            if not queue.backlog:
                queue.credit = 0.0
            elif key == OTHER_KEYS or self.per_key == math.inf:
                queue.credit = math.inf
                able += queue.backlog
            else:
                # A part of a message goes on; time in which the worker had no turn does not.
                queue.credit = queue.credit % 1.0 + self.per_key
                able += min(queue.backlog, int(queue.credit))
        return able

    def take(self, most: int, slot: int, waits: Counter[int]) -> None:
        """Take messages, the oldest first as far as keys allow; note how many slots they waited."""
        self.served += most
        able = [queue for queue in self.queues.values() if queue.backlog and queue.credit >= 1]
        while most:
            queue = min(able, key=lambda one: one.chunks[0][0]) if len(able) > 1 else able[0]
            since, taken = queue.take(min(most, queue.backlog, *_whole(queue.credit)))
            waits[slot - since] += taken
            most -= taken
            if not queue.backlog or queue.credit < 1:
                able.remove(queue)


def _whole(credit: float) -> tuple[int, ...]:
    return () if credit == math.inf else (int(credit),)


class SimulatedMembers(NamedTuple):
    """A group's members. `per_s`: messages per second of each; `concurrency`: its workers, so a key gets `per_s` over
    it; None: keys are not limited."""

    size: int
    per_s: float
    concurrency: int | None = None
    by_rate: bool = False

    def per_key(self, slot_s: float) -> float:
        """Return the messages of one key that a slot suffices for."""
        return math.inf if self.concurrency is None else self.per_s / self.concurrency * slot_s


def shares(budget: int, wanted: Sequence[int]) -> list[int]:
    """Divide a budget fairly: none gets more than it wants, and nothing is left that one wants."""
    found = [0] * len(wanted)
    left = len(wanted)
    for at in sorted(range(len(wanted)), key=lambda at: (wanted[at], at)):
        # The remainder goes to the last, who want most.
        found[at] = min(wanted[at], budget // left)
        budget -= found[at]
        left -= 1
    return found
