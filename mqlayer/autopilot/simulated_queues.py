"""Queues of a simulated topic: pure. Arrivals of a slot can be handled in it."""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, NamedTuple

OTHER_KEYS: Final = -1
"""In place of a hot key."""


class ArrivalCell(NamedTuple):
    """Messages of an LP in a slot, of one hot key or all others."""

    slot: int
    lp: int
    key: int
    messages: int


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Messages per slot and LP, 12 bytes per cell. `keys`: the hot ones."""

    began: datetime
    slot_s: float
    keys: Sequence[str]
    _firsts: array[int]
    _lps: array[int]
    _keys: array[int]
    _messages: array[int]

    @classmethod
    def of(cls, began: datetime, slot_s: float, keys: Sequence[str], cells: Iterable[ArrivalCell]) -> Arrivals:
        """Return arrivals of cells, ordered by slot."""
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
        """Their number."""
        return len(self._firsts) - 1

    @property
    def messages(self) -> int:
        """Their sum."""
        return sum(self._messages)

    def at(self, slot: int) -> Iterator[tuple[int, int, int]]:
        """Return LPs, hot keys, and messages."""
        cells = slice(self._firsts[slot], self._firsts[slot + 1])
        return zip(self._lps[cells], self._keys[cells], self._messages[cells], strict=True)

    def time_of(self, slot: int) -> datetime:
        """Return a slot's begin."""
        return self.began + timedelta(seconds=slot * self.slot_s)

    def per_lp(self) -> Counter[int]:
        """Return totals."""
        found: Counter[int] = Counter()
        for lp, messages in zip(self._lps, self._messages, strict=True):
            found[lp] += messages
        return found


@dataclass(slots=True)
class SimulatedQueue:
    """Chunks of [slot, messages], in order. `credit`: the most to take now."""

    chunks: deque[list[int]] = field(default_factory=deque)
    backlog: int = 0
    credit: float = 0.0

    def add(self, slot: int, messages: int) -> None:
        """Append messages."""
        if self.chunks and self.chunks[-1][0] == slot:
            self.chunks[-1][1] += messages
        else:
            self.chunks.append([slot, messages])
        self.backlog += messages

    def take(self, most: int) -> tuple[int, int]:
        """Take of the oldest slot; return slot and messages."""
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
    """A partition. `parents`: undrained ones; `per_key`: a key's messages in one slot."""

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
        """Sealed and empty."""
        return not self.is_open and not self.backlog

    @property
    def oldest(self) -> int | None:
        """Its oldest message's slot."""
        return min((queue.chunks[0][0] for queue in self.queues.values() if queue.chunks), default=None)

    def add(self, slot: int, key: int, messages: int) -> None:
        """Append messages."""
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = SimulatedQueue()
        queue.add(slot, messages)
        self.arrived += messages

    def refresh(self) -> int:
        """Begin a slot; return the most to take."""
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
        """Take the oldest that keys allow; count by slots waited."""
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
    """`per_s`: of each; a key gets it divided by `concurrency`, None: all."""

    size: int
    per_s: float
    concurrency: int | None = None
    by_rate: bool = False

    def per_key(self, slot_s: float) -> float:
        """Return a key's messages in one slot."""
        return math.inf if self.concurrency is None else self.per_s / self.concurrency * slot_s


def shares(budget: int, wanted: Sequence[int]) -> list[int]:
    """Divide a budget evenly, giving none more than wanted."""
    found = [0] * len(wanted)
    left = len(wanted)
    for at in sorted(range(len(wanted)), key=lambda at: (wanted[at], at)):
        # The remainder goes to the last, who want most.
        found[at] = min(wanted[at], budget // left)
        budget -= found[at]
        left -= 1
    return found
