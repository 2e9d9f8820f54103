"""When a partition's offsets were delivered to this member, per read."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

from mqlayer.domain.offsets import OffsetRange

GRAIN_S: Final = 0.05
"""Reads within this time count as one, to bound memory."""
UNKNOWN: Final = -1.0


class DeliveryTimes:
    """Read times of one partition's unsettled offsets. Thread-safe."""

    __slots__ = ("_ats", "_lasts", "_lock")

    def __init__(self) -> None:
        self._lasts, self._ats = array("q"), array("d")
        self._lock = threading.Lock()

    def note(self, first: int, last: int, now: float) -> None:
        """Note that `first` to `last` came now; skipped offsets have no time."""
        with self._lock:
            if first - 1 > (self._lasts[-1] if self._lasts else 0):
                self._lasts.append(first - 1)
                self._ats.append(UNKNOWN)
            if self._ats and self._ats[-1] != UNKNOWN and now - self._ats[-1] < GRAIN_S:
                self._lasts[-1] = max(last, self._lasts[-1])
            elif not self._lasts or last > self._lasts[-1]:
                self._lasts.append(last)
                self._ats.append(now)

    def forget(self, committed: int) -> None:
        """Forget offsets below `committed`."""
        with self._lock:
            # One entry stays, as the lower bound of the next.
            done = min(bisect_left(self._lasts, committed), len(self._lasts) - 1)
            if done > 0:
                del self._lasts[:done], self._ats[:done]

    def ages(self, ranges: Iterable[OffsetRange], now: float) -> list[tuple[int, int | None]]:
        """Return, for sorted ranges, (last offset, age in ms or None if unknown)."""
        found: list[tuple[int, int | None]] = []
        with self._lock:
            at, count = 0, len(self._lasts)
            for first, last in ranges:
                at = bisect_left(self._lasts, first, at)
                while at < count:
                    came, upto = self._ats[at], self._lasts[at]
                    if not found or found[-1][0] < upto:
                        found.append((upto, None if came == UNKNOWN else max(0, round((now - came) * 1000))))
                    if upto >= last:
                        break
                    at += 1
        return found
