"""This machine's clock for durations: goes on while the machine is suspended, never set by anybody."""

from __future__ import annotations

import time

if hasattr(time, "CLOCK_BOOTTIME"):

    def clock() -> float:
        """Return seconds since some fixed moment, time spent suspended included."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:
    clock = time.monotonic
