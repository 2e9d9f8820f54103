"""What one member may begin of each class of keys: docs/design/key-class-limits.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mqlayer.consuming.engine.rate_limiter import SUM_ERROR
from mqlayer.domain.rates import BUCKET_S, RateLimit

LEAST_LOAD: Final = 256
"""Fewer messages are not worth a read, unless a smaller part of the room is an eighth of it, or none waits."""


@dataclass(frozen=True, slots=True)
class ClassLimits:
    """Limits of each class: `concurrency`: keys at once here; `rate`: of the group; `partitions`: read here."""

    concurrency: int | None = None
    rate: RateLimit | None = None
    partitions: int = 1

    @property
    def most(self) -> float:
        """Permits that a class keeps."""
        if self.rate is None:
            return 0.0
        return min(max(1.0, self.rate.burst), max(1.0, self.rate.share.per_s * self.partitions * BUCKET_S))


NO_LIMITS = ClassLimits()


class ClassTurn:
    """A class's turns. `time`: the messages that it began, in virtual time; `running`: its keys that workers have."""

    __slots__ = ("in_turn", "name", "permits", "running", "time")

    def __init__(self, name: bytes, time: int) -> None:
        self.name, self.time, self.in_turn = name, time, False
        self.running, self.permits = 0, 0.0

    def may_begin(self, limits: ClassLimits) -> bool:
        """Whether its next key may begin."""
        if limits.concurrency is not None and self.running >= limits.concurrency:
            return False
        return limits.rate is None or self.permits + SUM_ERROR >= 1

    def take(self) -> None:
        """Count a key that begins, with one message."""
        self.running += 1
        self._charge(1)

    def put_back(self) -> None:
        """Count it no more: it did not begin."""
        self.running -= 1
        self._charge(-1)

    def most(self, count: int, limits: ClassLimits) -> int:
        """Return how many messages may begin of a key that was taken."""
        return count if limits.rate is None else max(1, min(count, 1 + int(self.permits + SUM_ERROR)))

    def began(self, messages: int) -> None:
        """Count a key's messages."""
        self._charge(messages - 1)

    def returned(self, messages: int) -> None:
        """Count less: they came back unhandled."""
        self._charge(-messages)

    def ended(self) -> None:
        """Count a key less."""
        self.running -= 1

    def grant(self, permits: float) -> None:
        """Add a part of the rate."""
        self.permits += permits

    def _charge(self, messages: int) -> None:
        self.time += messages
        self.permits -= messages


def class_has_room(waiting: int, count: int, limit: int) -> bool:
    """Whether a class with `waiting` messages may have one more among `count`.

    It takes half of the free room, so that a class without any finds some; each class may have one message.
    """
    return waiting < limit - count if waiting else count < 2 * limit


def class_load(waiting: int, count: int, limit: int, *, size_room: int, most: int) -> int:
    """Return how many messages of a class to read again, up to `most`, and `size_room` by their bytes; 0: none yet."""
    room = min((limit - count - waiting) // 2, size_room, most)
    if room >= min(LEAST_LOAD, max(1, limit // 8), most):
        return room
    return 1 if not waiting and class_has_room(0, count, limit) else 0
