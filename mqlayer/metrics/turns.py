"""Durations of workers' turns, added up while they are quick."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Final

QUICK_S: Final = 0.005
"""Turns below are added up to this; the first bucket's bound."""
LONGEST_GAP_S: Final = 1.0
"""After so long without a sample, a turn is one."""

failed_class: Final[ContextVar[str]] = ContextVar("mqlayer_failed_class", default="")
"""Class of the present turn's last error, or ''."""

RecordTurn = Callable[[float, str], None]


class TurnTimer:
    """One worker's turns. `record(seconds, error_class)` takes a sample."""

    __slots__ = ("_clock", "_pending_s", "_record", "_recorded_at")

    def __init__(self, record: RecordTurn, clock: Callable[[], float] = time.perf_counter) -> None:
        self._record, self._clock = record, clock
        self._pending_s, self._recorded_at = 0.0, clock()

    def timed(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return `run`, timed."""

        def turn() -> None:
            failed_class.set("")
            began = self._clock()
            run()
            self._note(began)

        return turn

    def timed_async(self, run: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """Return a coroutine function, timed."""

        async def turn() -> None:
            failed_class.set("")
            began = self._clock()
            await run()
            self._note(began)

        return turn

    def _note(self, began: float) -> None:
        now = self._clock()
        seconds, error = now - began, failed_class.get()
        if error or seconds >= QUICK_S:
            if self._pending_s:
                self._record(self._pending_s, "")
            self._record(seconds, error)
        else:
            self._pending_s += seconds
            if self._pending_s < QUICK_S and now - self._recorded_at < LONGEST_GAP_S:
                return
            self._record(self._pending_s, "")
        self._pending_s, self._recorded_at = 0.0, now
