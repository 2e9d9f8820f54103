"""This machine's clock for durations, and the lease on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

# Called before every message: a partial costs a third of a function.
clock: Final[Callable[[], float]] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
"""Seconds from a fixed moment, never adjusted; includes suspended time where the system supports that."""


class Lease:
    """A member's deadline; set by its heartbeat, checked before every message."""

    __slots__ = ("until",)

    def __init__(self) -> None:
        self.until = 0.0

    def holds(self) -> bool:
        """Whether the lease holds."""
        return clock() < self.until
