"""What is done to the consumers half-way: one is killed, one is stopped past its time and woken."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Final

from examples.bank.crews import Crew, Victim
from examples.bank.stage import LEASE_S
from mqlayer.stack.wait import comes_true

CAUGHT_WITHIN_S: Final = 20.0
BETWEEN_LOOKS_S: Final = 0.02
TAKEN_OVER_WITHIN_S: Final = 30.0


class Faults:
    """The two faults, side by side with the load, in a thread of their own."""

    def __init__(self, crew: Crew, *, note: Callable[[str], None]) -> None:
        self._crew, self._note = crew, note
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)
        self._cancelled = threading.Event()
        self.started = False
        self.error = ""

    def start(self) -> None:
        """Begin."""
        self.started = True
        self._thread.start()

    def finish(self) -> None:
        """Wait until the stopped process is awake again."""
        if self.started:
            self._thread.join()

    def cancel(self) -> None:
        """Wake the stopped process at once."""
        self._cancelled.set()
        self.finish()

    def _run(self) -> None:
        killed = self._catch()
        if killed is None:
            return
        self._signal(killed, signal.SIGKILL, f"with {killed.has}: killed (SIGKILL)")
        stopped = self._catch()
        if stopped is None:
            return
        self._signal(stopped, signal.SIGSTOP, f"with {stopped.has}: stopped (SIGSTOP)")
        try:
            self._cancelled.wait(1.5 * LEASE_S)
            if not comes_true(lambda: self._relieved(stopped), within_s=TAKEN_OVER_WITHIN_S):
                self.error = f"nobody took what the stopped process had within {TAKEN_OVER_WITHIN_S:g} s"
        finally:
            self._signal(stopped, signal.SIGCONT, f"woken (SIGCONT): {self._crew.over}")

    def _catch(self) -> Victim | None:
        until = time.monotonic() + CAUGHT_WITHIN_S
        while (victim := self._crew.catch()) is None:
            if self._cancelled.wait(BETWEEN_LOOKS_S) or time.monotonic() > until:
                self.error = "no two consumer processes had anything to lose half-way"
                break
        return victim

    def _relieved(self, stopped: Victim) -> bool:
        return self._cancelled.is_set() or stopped.relieved()

    def _signal(self, victim: Victim, number: signal.Signals, event: str) -> None:
        victim.signal(number)
        self._note(f"process {victim.pid} {event}")
