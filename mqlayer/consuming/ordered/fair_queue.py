"""Ready key queues by class, given out in turn: docs/design/key-class-limits.md."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count
from typing import Final

from mqlayer.consuming.ordered.class_limits import NO_LIMITS, ClassLimits, ClassTurn
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition
from mqlayer.domain.key_classes import KeyClassRule

TURN: Final = 32
"""Messages of a key that begin in one turn."""
KEPT_CLASSES: Final = 64


class ReadyClass(ClassTurn):
    """One class's ready key queues."""

    __slots__ = ("key_queues",)

    def __init__(self, name: bytes, time: int) -> None:
        super().__init__(name, time)
        self.key_queues: deque[KeyQueue] = deque()

    def keep(self, wanted: Callable[[KeyQueue], bool]) -> None:
        """Take the others out."""
        self.key_queues = deque(key_queue for key_queue in self.key_queues if wanted(key_queue))


class FairQueue:
    """A deque of key queues whose classes take turns: the class that began the fewest messages goes first.

    It is false where no class may begin.
    """

    def __init__(
        self, rule: KeyClassRule, key_queues: Iterable[KeyQueue] = (), limits: ClassLimits = NO_LIMITS
    ) -> None:
        self.rule, self.limits = rule, limits
        self._classes: dict[bytes, ReadyClass] = {}
        self._turns: list[tuple[int, int, ReadyClass]] = []
        self._order = count()
        self._time = self._count = 0
        self._kept = KEPT_CLASSES
        self.extend(key_queues)

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        return self._next() is not None

    def __iter__(self) -> Iterator[KeyQueue]:
        in_turn = sorted(self._classes.values(), key=lambda one: one.time)
        return chain.from_iterable([one.key_queues for one in in_turn])

    def __contains__(self, key_queue: KeyQueue) -> bool:
        return any(key_queue in one.key_queues for one in self._classes.values())

    @property
    def oldest(self) -> KeyQueue:
        """The head of a class that has waited longest."""
        return min((one.key_queues[0] for one in self._classes.values() if one.key_queues), key=lambda head: head.since)

    def popleft(self) -> KeyQueue:
        """Take the next class's first key queue, for `begin`. Raises IndexError where none may begin."""
        one = self._next()
        if one is None:
            raise IndexError("no class may begin")
        return self._take(one, one.key_queues.popleft())

    def take_first(self, fits: Callable[[KeyQueue], bool]) -> KeyQueue | None:
        """Take the first key queue that fits, of classes that may begin."""
        for one in sorted(self._classes.values(), key=lambda one: one.time):
            if one.may_begin(self.limits):
                for key_queue in one.key_queues:
                    if fits(key_queue):
                        one.key_queues.remove(key_queue)
                        return self._take(one, key_queue)
        return None

    def turn(self, key_queue: KeyQueue) -> int:
        """Return how many messages a taken key queue may begin."""
        return TURN if key_queue.class_turn is None else key_queue.class_turn.most(TURN, self.limits)

    def ended(self, turn: ClassTurn) -> None:
        """Count a class's key less."""
        turn.ended()
        self.resume(turn.name)

    def wanted(self, most: int) -> dict[bytes, float]:
        """Return the permits that waiting classes lack, of so many classes at most."""
        lacking = [one for one in self._classes.values() if one.key_queues and one.permits < self.limits.most / 2]
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
        if one is not None and one.key_queues and not one.in_turn and one.may_begin(self.limits):
            # Idle time gives no right to a burst.
            one.time, one.in_turn = max(one.time, self._time), True
            heapq.heappush(self._turns, (one.time, next(self._order), one))

    def append(self, key_queue: KeyQueue) -> None:
        """Add a key queue behind those of its class."""
        one = self._class_of(key_queue)
        one.key_queues.append(key_queue)
        self._count += 1
        self.resume(one.name)

    def extend(self, key_queues: Iterable[KeyQueue]) -> None:
        """Add several."""
        for key_queue in key_queues:
            self.append(key_queue)

    def appendleft(self, key_queue: KeyQueue) -> None:
        """Put a taken key queue back."""
        one = self._class_of(key_queue)
        one.key_queues.appendleft(key_queue)
        one.put_back()
        self._count += 1
        self.resume(one.name)

    def extendleft(self, key_queues: Iterable[KeyQueue]) -> None:
        """Put several back, the last taken first."""
        for key_queue in key_queues:
            self.appendleft(key_queue)

    def remove(self, key_queue: KeyQueue) -> None:
        """Take a key queue out that does not begin. Raises ValueError without it."""
        self._class_of(key_queue).key_queues.remove(key_queue)
        self._count -= 1

    def drop(self, owned: OwnedPartition) -> None:
        """Take a partition's key queues out."""
        for one in self._classes.values():
            one.keep(lambda key_queue: key_queue.owned is not owned)
        self._count = sum(len(one.key_queues) for one in self._classes.values())

    def _next(self) -> ReadyClass | None:
        turns = self._turns
        while turns:
            time, _, one = turns[0]
            if not one.key_queues or not one.may_begin(self.limits):
                heapq.heappop(turns)
                one.in_turn = False
            elif time < one.time:
                heapq.heapreplace(turns, (one.time, next(self._order), one))
            else:
                return one
        return None

    def _take(self, one: ReadyClass, key_queue: KeyQueue) -> KeyQueue:
        self._time = max(self._time, one.time)
        one.take()
        self._count -= 1
        return key_queue

    def _class_of(self, key_queue: KeyQueue) -> ReadyClass:
        known = key_queue.class_turn
        name = self.rule.of(key_queue.records[0]) if known is None else known.name
        one = self._classes.get(name)
        if one is None:
            self._forget_idle()
            self._classes[name] = one = ReadyClass(name, self._time)
        key_queue.class_turn = one
        return one

    def _forget_idle(self) -> None:
        if len(self._classes) < self._kept:
            return
        self._classes = {
            name: one for name, one in self._classes.items() if one.key_queues or one.running or one.time > self._time
        }  # fmt: skip
        self._kept = 2 * len(self._classes) + KEPT_CLASSES
