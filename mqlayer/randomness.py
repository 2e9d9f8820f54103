"""Random numbers that leave Python's global generator alone.

A program may have seeded that one, and Hypothesis fails a test in whose draws a thread used it. So no thread of a
member, producer or relay does. The system's source has no state: threads and forked processes share it.
"""

from __future__ import annotations

import random
from typing import Final

from tenacity import RetryCallState
from tenacity.wait import wait_exponential

RNG: Final = random.SystemRandom()


class FullJitter(wait_exponential):
    """Tenacity's wait_random_exponential, by RNG."""

    def __call__(self, retry_state: RetryCallState) -> float:
        """Return the wait before the next attempt."""
        return RNG.uniform(self.min, super().__call__(retry_state))
