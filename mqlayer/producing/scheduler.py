"""A producer's background jobs, in one thread."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from mqlayer.errors import MqlayerError
from mqlayer.runtime.service import Service

ScheduledCall = Callable[[], None]


class Scheduler(Service):
    """Runs jobs in turn; the thread starts with the first one.

    After an MqlayerError a job must reschedule itself. Other errors repeat it after a second.
    """

    def __init__(self) -> None:
        super().__init__(
            "mqlayer-producer-scheduler", title="the producer's scheduler", event="producer_job", retry_s=0.0
        )
        self._calls: list[tuple[float, int, ScheduledCall]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def schedule(self, call: ScheduledCall, *, after_s: float = 0.0) -> None:
        """Run a job after a time; ignored once stopped."""
        with self._lock:
            if self._stopping.is_set():
                return
            heapq.heappush(self._calls, (time.monotonic() + after_s, next(self._numbers), call))
            if not self.started:
                self.start()
        self.wake.set()

    def _wait_s(self) -> float | None:
        with self._lock:
            return max(0.0, self._calls[0][0] - time.monotonic()) if self._calls else None

    def _pass(self) -> None:
        call = self._next_call()
        if call is None:
            return
        try:
            call()
        except MqlayerError:
            raise
        except Exception:
            self.schedule(call, after_s=1.0)
            raise

    def _next_call(self) -> ScheduledCall | None:
        with self._lock:
            if self._stopping.is_set() or not self._calls or self._calls[0][0] > time.monotonic():
                return None
            return heapq.heappop(self._calls)[2]

    def _close(self) -> None:
        with self._lock:
            self._calls.clear()
