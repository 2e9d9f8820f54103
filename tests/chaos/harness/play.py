"""The processes of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Final

from mqlayer.settings import Settings
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import Process, start_python

ROOT: Final = Path(__file__).parents[3]
LEASE_S: Final = 1.5
POLL_INTERVAL_S: Final = 0.05
"""How often it is looked whether a process ended that was told to."""
LONGEST_STACK: Final = 4_000


class Play:
    """The processes of a run, by name; one that was killed is started again under its name."""

    def __init__(self, settings: Settings, directory: Path, **environment: str) -> None:
        self._directory = directory
        self._environment = (
            os.environ
            | {
                "MQLAYER_DSN": settings.control_dsn(),
                "MQLAYER_KEY_PREFIX": settings.key_prefix,
                "MQLAYER_LEASE_S": str(LEASE_S),
                # Of the actors' own sessions: one that nobody answers would last longer than the run.
                "PGCONNECT_TIMEOUT": "5",
            }
            | environment
        )
        self.processes: dict[str, Process] = {}

    def start(self, name: str, failpoints: str = "") -> None:
        """Start a process, its output to a file, perhaps to be broken at a place."""
        with (self._directory / f"{name}.log").open("ab") as log:
            role = name.partition("-")[0]
            words = ("tests.chaos.actors", role, name, str(self._directory))
            self.processes[name] = self._run(name, words, self._environment | armed(failpoints), log)

    def _run(self, name: str, words: Sequence[str], environment: dict[str, str], log: IO[bytes]) -> Process:
        del name
        return start_python(*words, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def kill(self, name: str, failpoints: str = "") -> None:
        """End a process without warning, and start it again."""
        self.processes[name].kill()
        self.processes[name].wait()
        self.start(name, failpoints)

    def restart(self, name: str, within_s: float, *, meanwhile: Callable[[], None]) -> bool:
        """End a process in order, as a deployment does, and start it again; say whether it ended within the time."""
        in_time = self.leave(name, within_s, meanwhile=meanwhile)
        self.start(name)
        return in_time

    def leave(self, name: str, within_s: float, *, meanwhile: Callable[[], None]) -> bool:
        """End a process in order, for good; say whether it ended within the time.

        `meanwhile` is called again and again: it may wait for a process that somebody has to wake up.
        """
        process = self.processes.pop(name)
        process.send_signal(signal.SIGCONT)
        process.terminate()
        deadline = time.monotonic() + within_s
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
                process.wait()
                return False
            meanwhile()
            time.sleep(POLL_INTERVAL_S)
        return True

    def pause(self, name: str, seconds: float) -> None:
        """Stop a process for a while, in the background."""
        process = self.processes[name]
        process.send_signal(signal.SIGSTOP)
        threading.Timer(seconds, process.send_signal, (signal.SIGCONT,)).start()

    def names(self, role: str) -> list[str]:
        """Return the names of a role's processes."""
        return [name for name in self.processes if name.startswith(role)]

    def ended(self) -> list[str]:
        """Return the names of those that do not run any more."""
        return [name for name, process in self.processes.items() if process.poll() is not None]

    def end(self, role: str, timeout_s: float = 30) -> None:
        """End a role in order; a process that does not is killed, and the test fails."""
        names = self.names(role)
        for name in names:
            self.processes[name].send_signal(signal.SIGCONT)
            self.processes[name].terminate()
        late = []
        for name in names:
            process = self.processes.pop(name)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                late.append(f"{name}: {self._where(name, process)}")
                process.kill()
                process.wait()
        assert not late, f"these did not end at SIGTERM: {late}"

    def _where(self, name: str, process: Process) -> str:
        """Return where each thread of a process is, as it says itself at a signal."""
        log = self._directory / f"{name}.log"
        before, deadline = log.stat().st_size, time.monotonic() + 5
        process.send_signal(signal.SIGUSR1)
        while log.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
        return log.read_bytes()[before:].decode(errors="replace")[:LONGEST_STACK]

    def kill_all(self) -> None:
        """Leave nothing behind."""
        for process in self.processes.values():
            process.kill()
            process.wait()
