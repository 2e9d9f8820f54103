"""Ready work by class, given out in turn: docs/design/key-class-limits.md."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count
from typing import Final, Generic, Protocol, TypeVar

from mqlayer.consuming.engine.class_limits import NO_LIMITS, ClassLimits, ClassTurn
from mqlayer.domain.key_classes import KeyClassRule
from mqlayer.domain.message import Record

TURN: Final = 32
"""Messages of a key that begin in one turn."""
KEPT_CLASSES: Final = 64


class ClassWork(Protocol):
    """A key queue, or a shared group's messages of one class."""

    class_turn: ClassTurn | None

    @property
    def records(self) -> Sequence[Record]:
        """Messages of one class; the first tells which."""


T = TypeVar("T", bound=ClassWork)


class ReadyClass(ClassTurn, Generic[T]):
    """One class's ready work."""

    __slots__ = ("works",)

    def __init__(self, name: bytes, time: int) -> None:
        super().__init__(name, time)
        self.works: deque[T] = deque()

    def keep(self, wanted: Callable[[T], bool]) -> None:
        """Take the others out."""
        self.works = deque(work for work in self.works if wanted(work))


class FairQueue(Generic[T]):
    """A deque whose classes take turns: the class that began the fewest messages goes first.

    It is false where no class may begin.
    """

    def __init__(self, rule: KeyClassRule, works: Iterable[T] = (), limits: ClassLimits = NO_LIMITS) -> None:
        self.rule, self.limits = rule, limits
        self._classes: dict[bytes, ReadyClass[T]] = {}
        self._turns: list[tuple[int, int, ReadyClass[T]]] = []
        self._order = count()
        self._time = self._count = 0
        self._kept = KEPT_CLASSES
        self.extend(works)

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        return self._next() is not None

    def __iter__(self) -> Iterator[T]:
        in_turn = sorted(self._classes.values(), key=lambda one: one.time)
        return chain.from_iterable([one.works for one in in_turn])

    def heads(self) -> Iterator[T]:
        """Return each class's first."""
        return (one.works[0] for one in self._classes.values() if one.works)

    def popleft(self) -> T:
        """Take the next class's first, for `begin`. Raises IndexError where none may begin."""
        one = self._next()
        if one is None:
            raise IndexError("no class may begin")
        return self._take(one, one.works.popleft())

    def take_first(self, fits: Callable[[T], bool]) -> T | None:
        """Take the first that fits, of classes that may begin."""
        for one in sorted(self._classes.values(), key=lambda one: one.time):
            if one.may_begin(self.limits):
                for work in one.works:
                    if fits(work):
                        one.works.remove(work)
                        return self._take(one, work)
        return None

    def turn(self, work: T) -> int:
        """Return how many messages taken work may begin."""
        return TURN if work.class_turn is None else work.class_turn.most(TURN, self.limits)

    def ended(self, turn: ClassTurn) -> None:
        """Count a class's key less."""
        turn.ended()
        self.resume(turn.name)

    def wanted(self, most: int) -> dict[bytes, float]:
        """Return the permits that waiting classes lack, of so many classes at most."""
        lacking = [one for one in self._classes.values() if one.works and one.permits < self.limits.most / 2]
        lacking.sort(key=lambda one: one.time)
        return {one.name: self.limits.most - one.permits for one in lacking[:most]}

    def grant(self, name: bytes, permits: float) -> None:
        """Add to a class's permits."""
        one = self._classes.get(name)
        if one is not None:
            one.grant(permits)
            self.resume(name)

    def limit(self, limits: ClassLimits) -> None:
        """Change the limits."""
        self.limits = limits
        for name in self._classes:
            self.resume(name)

    def resume(self, name: bytes) -> None:
        """Give a class turns again, if it may begin."""
        one = self._classes.get(name)
        if one is not None and one.works and not one.in_turn and one.may_begin(self.limits):
            # Idle time gives no right to a burst.
            one.time, one.in_turn = max(one.time, self._time), True
            heapq.heappush(self._turns, (one.time, next(self._order), one))

    def append(self, work: T) -> None:
        """Add a work behind those of its class."""
        one = self._class_of(work)
        one.works.append(work)
        self._count += 1
        self.resume(one.name)

    def extend(self, works: Iterable[T]) -> None:
        """Add several."""
        for work in works:
            self.append(work)

    def appendleft(self, work: T) -> None:
        """Put taken work back: it did not begin."""
        self._class_of(work).put_back()
        self.restore(work)

    def restore(self, work: T) -> None:
        """Put the rest of taken work first."""
        one = self._class_of(work)
        one.works.appendleft(work)
        self._count += 1
        self.resume(one.name)

    def extendleft(self, works: Iterable[T]) -> None:
        """Put several back, the last taken first."""
        for work in works:
            self.appendleft(work)

    def remove(self, work: T) -> None:
        """Take a work out that does not begin. Raises ValueError without it."""
        self._class_of(work).works.remove(work)
        self._count -= 1

    def keep(self, wanted: Callable[[T], bool]) -> None:
        """Take the others out."""
        for one in self._classes.values():
            one.keep(wanted)
        self._count = sum(len(one.works) for one in self._classes.values())

    def _next(self) -> ReadyClass[T] | None:
        turns = self._turns
        while turns:
            time, _, one = turns[0]
            if not one.works or not one.may_begin(self.limits):
                heapq.heappop(turns)
                one.in_turn = False
            elif time < one.time:
                heapq.heapreplace(turns, (one.time, next(self._order), one))
            else:
                return one
        return None

    def _take(self, one: ReadyClass[T], work: T) -> T:
        self._time = max(self._time, one.time)
        one.take()
        self._count -= 1
        return work

    def _class_of(self, work: T) -> ReadyClass[T]:
        known = work.class_turn
        work.class_turn = one = self.class_named(self.rule.of(work.records[0]) if known is None else known.name)
        return one

    def class_named(self, name: bytes) -> ReadyClass[T]:
        """Return a class, also one without work."""
        one = self._classes.get(name)
        if one is None:
            self._forget_idle()
            self._classes[name] = one = ReadyClass(name, self._time)
        return one

    def _forget_idle(self) -> None:
        if len(self._classes) < self._kept:
            return
        self._classes = {
            name: one for name, one in self._classes.items() if one.works or one.running or one.time > self._time
        }  # fmt: skip
        self._kept = 2 * len(self._classes) + KEPT_CLASSES
