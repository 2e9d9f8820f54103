"""Background jobs of a producer that ask Postgres or read back: one thread, jobs due at a time."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from mqlayer.errors import MqlayerError

log = logging.getLogger(__name__)

Job = Callable[[], None]


class Clerk:
    """Runs jobs one after another in a thread of its own, which starts with the first job.

    A job that fails with an error of ours is logged; it must schedule itself again if it has to. One that fails
    otherwise is run again after a second, because somebody may wait for what it does.
    """

    def __init__(self) -> None:
        self._jobs: list[tuple[float, int, Job]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def do(self, job: Job, *, after_s: float = 0.0) -> None:
        """Run a job as soon as its time has come."""
        with self._changed:
            if self._stopping:
                return
            heapq.heappush(self._jobs, (time.monotonic() + after_s, next(self._numbers), job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mqlayer-producer-clerk", daemon=True)
                self._thread.start()
            self._changed.notify()

    def stop(self, timeout_s: float) -> None:
        """Drop all jobs and end the thread."""
        with self._changed:
            self._stopping = True
            self._jobs.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                job()
            except MqlayerError as error:
                log.warning("producer_job_failed", extra={"reason": str(error)})
            except Exception:
                log.exception("producer_job_failed")
                self.do(job, after_s=1.0)

    def _next_job(self) -> Job | None:
        with self._changed:
            while not self._stopping:
                if not self._jobs:
                    self._changed.wait()
                    continue
                wait_s = self._jobs[0][0] - time.monotonic()
                if wait_s <= 0:
                    return heapq.heappop(self._jobs)[2]
                self._changed.wait(wait_s)
            return None
