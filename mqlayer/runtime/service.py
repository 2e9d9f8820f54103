"""Work in the background: one thread, one loop, one way to log and to wait."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Final

from mqlayer.errors import MqlayerError
from mqlayer.health import Health, Liveness

log = logging.getLogger(__name__)

RETRY_S: Final = 0.5


class Service(ABC):
    """A thread that makes passes from `start` to `stop`; no error of a pass ends it.

    `title` names it for people, as in "the heartbeat". `event` begins its log events: `<event>_waits` for an
    MqlayerError, `<event>_failed` for any other error. `wake` starts a pass early.
    """

    def __init__(self, name: str, *, title: str, event: str, retry_s: float = RETRY_S) -> None:
        self.wake = threading.Event()
        self.last_error = ""
        self._title, self._event, self._retry_s = title, event, retry_s
        self._stopping = threading.Event()
        self._liveness = Liveness()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Ask the thread to end."""
        self._stopping.set()
        self.wake.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; say whether it ended."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """End the thread and wait; say whether it ended."""
        self.end()
        return self.join(timeout_s)

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return self._thread.ident is not None

    def health(self, limit_s: float) -> Health:
        """Report a thread that ended or makes no pass for `limit_s`, and the last error."""
        if self.started and not self._thread.is_alive():
            return Health(stuck=(f"{self._title} ended",))
        waits = (f"{self._title}: {self.last_error}",) if self.last_error else ()
        return Health(self._liveness.stuck(self._title, limit_s), waits)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.wake.wait(self._wait_s())
                self.wake.clear()
                if not self._try_pass():
                    self._stopping.wait(self._retry_s)
        finally:
            self._close()

    def _try_pass(self) -> bool:
        """Make a pass; return whether it succeeded."""
        self._liveness.note_turn()
        try:
            self._pass()
        except MqlayerError as error:
            self.last_error = str(error)
            log.warning("%s_waits", self._event, extra={"reason": self.last_error, **self._facts()})
            return False
        except Exception as error:  # noqa: BLE001 - a thread that died would leave its work undone for good
            self.last_error = where(error)
            log.error("%s_failed", self._event, extra={"error": self.last_error, **self._facts()})
            return False
        self.last_error = ""
        return True

    def _wait_s(self) -> float | None:
        """Return how long to wait for `wake` before the next pass; None: until then."""
        return RETRY_S

    @abstractmethod
    def _pass(self) -> None:
        """Do the present work."""

    def _close(self) -> None:  # noqa: B027 - most have nothing to close
        """Do what remains after the last pass, in the thread."""

    def _facts(self) -> Mapping[str, Any]:
        """Return what log events say besides the error."""
        return {}


def stop_all(services: Iterable[Service], timeout_s: float) -> bool:
    """End services in parallel, so that silent stores cost one timeout; say whether all ended."""
    until, ending = time.monotonic() + timeout_s, list(services)
    for service in ending:
        service.end()
    running = [service for service in ending if not service.join(until - time.monotonic())]
    return not running


def where(error: BaseException) -> str:
    """Return an exception's type and place, without its text, which may hold message data."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
