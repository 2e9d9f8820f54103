"""This machine's clock for durations: goes on while the machine is suspended, never set by anybody."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

# Asked before every message: a partial costs a third of a function.
clock: Final[Callable[[], float]] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
"""Seconds since some fixed moment, time spent suspended included where the system can tell."""


class Lease:
    """Until when a member may go on, on this machine's clock; set by its heartbeat, looked at before every message."""

    __slots__ = ("until",)

    def __init__(self) -> None:
        self.until = 0.0

    def holds(self) -> bool:
        """Say whether it has not run out."""
        return clock() < self.until
