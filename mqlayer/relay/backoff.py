"""How long to leave alone what failed."""

from __future__ import annotations

import random
from typing import Final

FIRST_S: Final = 0.05
ROUTE_FIRST_S: Final = 0.005
"""For a partition that is closed: a route change takes milliseconds."""
LONGEST_S: Final = 2.0


def backoff_s(failures: int, rng: random.Random, *, first_s: float = FIRST_S) -> float:
    """Return the wait in seconds after so many failures in a row: doubled each time, at most 2 s, never in step."""
    longest = min(LONGEST_S, first_s * 2.0 ** min(failures - 1, 10))
    return longest * rng.uniform(0.5, 1.0)


class Interval:
    """Says once per interval that it is time; the first time at once."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._next_at = float("-inf")

    def due(self, now: float) -> bool:
        """Return whether the interval has passed, and begin the next one."""
        if now < self._next_at:
            return False
        self._next_at = now + self.interval_s
        return True

    def hasten(self) -> None:
        """Have it due at the next question."""
        self._next_at = float("-inf")
