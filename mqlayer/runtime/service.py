"""Work in the background: one thread, one loop, one way to log and to wait."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Final

from mqlayer.errors import MqlayerError
from mqlayer.health import Health, Liveness
from mqlayer.logs import event_logger, is_reported
from mqlayer.runtime.error_text import where

log = event_logger(__name__)

RETRY_S: Final = 0.5


class Service(ABC):
    """A thread that makes passes from `start` to `stop`; no error of a pass ends it.

    `title` names it for people, as in "the heartbeat". `event` begins its log events: `<event>_<waiting>` for an
    MqlayerError, `<event>_failed` for any other error, `<event>_goes_on` after such. Of failures in a row some are
    logged, with their count, and each with another text. `wake` starts a pass early.
    """

    def __init__(self, name: str, *, title: str, event: str, waiting: str = "waits", retry_s: float = RETRY_S) -> None:
        self.wake = threading.Event()
        self.last_error = ""
        self._title, self._event, self._waiting, self._retry_s = title, event, waiting, retry_s
        self._stopping = threading.Event()
        self._liveness = Liveness()
        self._failures, self._failing_since = 0, 0.0
        self._told: object = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Ask the thread to end."""
        self._stopping.set()
        self.wake.set()

    def join(self, timeout_s: float) -> bool:
        """Wait; return whether the thread ended."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """End the thread; return whether it ended."""
        self.end()
        return self.join(timeout_s)

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return self._thread.ident is not None

    def health(self, limit_s: float) -> Health:
        """Report an ended thread, no pass for `limit_s`, or the last error."""
        if self.started and not self._thread.is_alive():
            return Health(stuck=(f"{self._title} ended",))
        return Health(self._liveness.stuck(self._title, limit_s), self._waits())

    def _waits(self) -> tuple[str, ...]:
        """Return why it makes no progress."""
        return (f"{self._title}: {self.last_error}",) if self.last_error else ()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._await_work()
                if not self._try_pass():
                    self._stopping.wait(self._retry_wait_s())
        finally:
            self._close()

    def _try_pass(self) -> bool:
        """Make a pass; return whether it succeeded."""
        self._liveness.note_turn()
        try:
            self._pass()
        except Exception as error:  # noqa: BLE001 - a thread that died would leave its work undone for good
            self._note_failure(error)
            return False
        if self._failures:
            seconds = round(time.monotonic() - self._failing_since, 1)
            log.info("%s_goes_on", self._event, extra={"failures": self._failures, "seconds": seconds, **self._facts()})
        self._failures, self.last_error, self._told = 0, "", None
        return True

    def _note_failure(self, error: Exception) -> None:
        text = str(error) if isinstance(error, MqlayerError) else where(error)
        if not self._failures:
            self._failing_since = time.monotonic()
        self._failures, self.last_error = self._failures + 1, text
        self._after_failure(error)
        told = (text, self._condition())
        if is_reported(self._failures) or told != self._told:
            self._told = told
            self._report(error)

    def _wait_s(self) -> float | None:
        """Return the longest wait for `wake`; None: no bound."""
        return RETRY_S

    @abstractmethod
    def _pass(self) -> None:
        """Do the present work."""

    def _close(self) -> None:  # noqa: B027 - most have nothing to close
        """Act after the last pass, in the thread."""

    def _after_failure(self, error: Exception) -> None:  # noqa: B027 - most have nothing to do
        """Act after each failed pass."""

    def _condition(self) -> object:
        """Return what a line about a failure says besides the error: a change of it is news."""
        return None

    def _report(self, error: Exception) -> None:
        facts = {"failures": self._failures, **self._facts()}
        if isinstance(error, MqlayerError):
            log.warning("%s_%s", self._event, self._waiting, extra={"reason": self.last_error, **facts})
        else:
            log.error("%s_failed", self._event, extra={"error": self.last_error, **facts})

    def _await_work(self) -> None:
        """Wait until a pass is due. A loop whose passes block overrides it."""
        self.wake.wait(self._wait_s())
        self.wake.clear()

    def _retry_wait_s(self) -> float:
        return self._retry_s

    def _facts(self) -> Mapping[str, Any]:
        """Return further facts of log events."""
        return {}


def stop_all(services: Iterable[Service], timeout_s: float) -> bool:
    """End services in parallel; return whether all ended."""
    until, ending = time.monotonic() + timeout_s, list(services)
    for service in ending:
        service.end()
    running = [service for service in ending if not service.join(until - time.monotonic())]
    return not running
