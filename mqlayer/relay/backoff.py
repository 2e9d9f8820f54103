"""Retry intervals."""

from __future__ import annotations

import random
from typing import Final

FIRST_S: Final = 0.05
ROUTE_FIRST_S: Final = 0.005
"""For closed partitions: a route change takes milliseconds."""
LONGEST_S: Final = 2.0


def backoff_s(failures: int, rng: random.Random, *, first_s: float = FIRST_S) -> float:
    """Return seconds to wait after consecutive failures: doubled each time, up to 2, with jitter."""
    longest = min(LONGEST_S, first_s * 2.0 ** min(failures - 1, 10))
    return longest * rng.uniform(0.5, 1.0)


class Interval:
    """Becomes due once per interval; first at once."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._next_at = float("-inf")

    def due(self, now: float) -> bool:
        """Whether it is due; if so, start the next interval."""
        if now < self._next_at:
            return False
        self._next_at = now + self.interval_s
        return True

    def hasten(self) -> None:
        """Make it due now."""
        self._next_at = float("-inf")
