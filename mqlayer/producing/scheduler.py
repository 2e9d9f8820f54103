"""A producer's background jobs, in one thread."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from mqlayer.errors import MqlayerError

log = logging.getLogger(__name__)

ScheduledCall = Callable[[], None]


class Scheduler:
    """Runs jobs in turn, in one thread.

    After an MqlayerError a job must reschedule itself. Other errors repeat it after a second.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[float, int, ScheduledCall]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def schedule(self, call: ScheduledCall, *, after_s: float = 0.0) -> None:
        """Run a job after a time; ignored once stopped."""
        with self._changed:
            if self._stopping:
                return
            heapq.heappush(self._calls, (time.monotonic() + after_s, next(self._numbers), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mqlayer-producer-scheduler", daemon=True)
                self._thread.start()
            self._changed.notify()

    def stop(self, timeout_s: float) -> None:
        """Drop all jobs and end the thread."""
        with self._changed:
            self._stopping = True
            self._calls.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (call := self._next_call()) is not None:
            try:
                call()
            except MqlayerError as error:
                log.warning("producer_job_failed", extra={"reason": str(error)})
            except Exception:
                log.exception("producer_job_failed")
                self.schedule(call, after_s=1.0)

    def _next_call(self) -> ScheduledCall | None:
        with self._changed:
            while not self._stopping:
                if not self._calls:
                    self._changed.wait()
                    continue
                wait_s = self._calls[0][0] - time.monotonic()
                if wait_s <= 0:
                    return heapq.heappop(self._calls)[2]
                self._changed.wait(wait_s)
            return None
