"""What is done to the consumers half-way: one is killed, one is stopped past its lease and woken."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from examples.bank.figures import Figures, Member
from examples.bank.stage import LEASE_S
from mqlayer.stack.deadlines import comes_true

TAKEN_OVER_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Victims:
    """Two consumer processes that hold partitions."""

    killed: Member
    stopped: Member


class Faults:
    """The two faults, side by side with the load, in a thread of their own. `spared_pid` is left alone."""

    def __init__(self, figures: Figures, *, spared_pid: int, note: Callable[[str], None]) -> None:
        self._figures, self._spared_pid, self._note = figures, spared_pid, note
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
        victims = self._choose()
        if victims is None:
            self.error = "no two consumer processes held partitions half-way"
            return
        killed, stopped = victims.killed, victims.stopped
        self._signal(killed, signal.SIGKILL, f"holds {killed.partitions} partitions: killed (SIGKILL)")
        self._signal(stopped, signal.SIGSTOP, f"holds {stopped.partitions} partitions: stopped (SIGSTOP)")
        try:
            self._cancelled.wait(1.5 * LEASE_S)
            if not comes_true(lambda: self._taken_over(stopped), within_s=TAKEN_OVER_WITHIN_S):
                self.error = f"nobody took the partitions of the stopped process within {TAKEN_OVER_WITHIN_S:g} s"
        finally:
            self._signal(stopped, signal.SIGCONT, "its lease is over, others have its partitions: woken (SIGCONT)")

    def _choose(self) -> Victims | None:
        """Return two processes that hold partitions."""
        members = [m for m in self._figures.members() if m.partitions and m.pid != self._spared_pid]
        return Victims(members[0], members[1]) if len(members) > 1 else None

    def _taken_over(self, stopped: Member) -> bool:
        if self._cancelled.is_set():
            return True
        return not any(m.member_id == stopped.member_id and m.partitions for m in self._figures.members())

    def _signal(self, member: Member, number: signal.Signals, event: str) -> None:
        with suppress(ProcessLookupError):
            os.kill(member.pid, number)
        self._note(f"consumer process {member.pid} {event}")
