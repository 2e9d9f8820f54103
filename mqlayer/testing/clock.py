"""The time of a test, which stands until the test turns it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Final

from mqlayer.consuming.engine import clock as engine_clock
from mqlayer.errors import InvalidInput

_PACKAGE: Final = "mqlayer.consuming."


class TestClock:
    """The time of one TestApp. Only `advance` moves it; nothing sleeps."""

    __test__ = False

    def __init__(self) -> None:
        self._began, self._passed_s = datetime.now(UTC), 0.0
        self._origin = engine_clock.clock()

    def advance(self, seconds: float) -> None:
        """Let time pass; the next `run` handles all that is due then. Raises InvalidInput below 0."""
        if not seconds >= 0:
            raise InvalidInput(f"time goes forward: advance by 0 seconds or more, not {seconds}")
        self._passed_s += seconds

    def now(self) -> datetime:
        """Return the time, in UTC."""
        return self._began + timedelta(seconds=self._passed_s)

    def seconds(self) -> float:
        """Return the time as the engine's clock says it."""
        return self._origin + self._passed_s


@contextmanager
def installed(clock: TestClock) -> Iterator[None]:
    """Have the engine go by this clock, in this thread; members that run in other threads keep the machine's."""
    real, thread = engine_clock.clock, threading.get_ident()

    def read() -> float:
        return clock.seconds() if threading.get_ident() == thread else real()

    # The engine's modules import the function itself: one call less per message than a clock that can be exchanged.
    users = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(_PACKAGE) and vars(module).get("clock") is real
    ]
    for module in users:
        vars(module)["clock"] = read
    try:
        yield
    finally:
        for module in users:
            vars(module)["clock"] = real
