"""Key classes of a shared member: which messages find room, and which wait on the node."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from mqlayer.consuming.engine.class_limits import NO_LIMITS, ClassLimits, class_has_room, class_load
from mqlayer.consuming.shared.ready_slices import ReadySlices
from mqlayer.domain.key_classes import KeyClassRule
from mqlayer.domain.message import Record
from mqlayer.redis.shared_scripts import AT_ONCE

NAMED_LIMIT: Final = 100
"""Classes named in one request for deferred messages."""


class ReadAhead(NamedTuple):
    """Messages and bytes in hand, with their limits."""

    messages: int
    limit: int
    size: int
    size_limit: int


class DeferredRoom(NamedTuple):
    """Deferred messages to take: in all, of a class that is not named, and of named ones."""

    most: int
    each: int
    named: Sequence[tuple[bytes, int]]


class SharedClasses:
    """Follows the group's rule. Thread-safe."""

    def __init__(
        self,
        lock: threading.Condition,
        ready: ReadySlices,
        read_ahead: Callable[[], ReadAhead],
        wake_workers: Callable[[], None],
    ) -> None:
        self._lock, self._ready, self._read_ahead, self._wake_workers = lock, ready, read_ahead, wake_workers
        self._rule: KeyClassRule | None = None
        self._limits = NO_LIMITS

    @property
    def active(self) -> bool:
        """Whether the group has key classes."""
        return self._rule is not None

    @property
    def limits(self) -> ClassLimits:
        """The limits of each class."""
        return self._limits

    def follow(self, rule: KeyClassRule | None, limits: ClassLimits) -> None:
        """Have classes take turns within limits, or not."""
        if (rule, limits) != (self._rule, self._limits):
            with self._lock:
                self._rule, self._limits = rule, limits
                self._ready.follow(rule, limits)
            self._wake_workers()

    def wanted(self, most: int) -> dict[bytes, float]:
        """Return the permits to ask for, by class."""
        with self._lock:
            fair = self._ready.fair
            return {} if fair is None else fair.wanted(most)

    def grant(self, permits: Mapping[bytes, float]) -> None:
        """Add permits, and wake workers."""
        with self._lock:
            fair = self._ready.fair
            if fair is not None:
                for name, granted in permits.items():
                    fair.grant(name, granted)
        self._wake_workers()

    def admit(self, records: Sequence[Record]) -> tuple[list[Record], list[tuple[int, bytes]]]:
        """Return the records that find room, and the others' offsets and classes."""
        rule = self._rule
        if rule is None:
            return list(records), []
        with self._lock:
            waiting, ahead = Counter(self._ready.waiting), self._read_ahead()
        taken: list[Record] = []
        deferred: list[tuple[int, bytes]] = []
        size = ahead.size
        for record in records:
            name = rule.of(record)
            of_class = waiting[name]
            has_room = class_has_room(of_class, ahead.messages + len(taken), ahead.limit)
            if has_room and not (of_class and size >= ahead.size_limit):
                waiting[name] = of_class + 1
                size += len(record.body)
                taken.append(record)
            else:
                deferred.append((record.offset, name))
        return taken, deferred

    def deferred_room(self, record_bytes: float) -> DeferredRoom:
        """Return how many deferred messages find room."""
        with self._lock:
            waiting, ahead = self._ready.waiting.most_common(NAMED_LIMIT), self._read_ahead()
        count, limit = ahead.messages, ahead.limit
        size_room = int((ahead.size_limit - ahead.size) / record_bytes)

        def room_of(of_class: int) -> int:
            return class_load(of_class, count, limit, size_room=size_room, most=AT_ONCE)

        if not self.active:
            room = min(limit - count, size_room, AT_ONCE)
            return DeferredRoom(room, room, ())
        named = [(name, room_of(of_class)) for name, of_class in waiting]
        each = room_of(0)
        # A class without messages in hand may have one.
        return DeferredRoom(min(AT_ONCE, max(limit - count, min(1, each))), each, named)
