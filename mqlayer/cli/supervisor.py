"""Start, watch, restart and stop processes of one command.

A socket pair ends each child with its supervisor, even after SIGKILL. Ended children restart after a growing wait; the
supervisor gives up if none ever started.

A child names each session of a member, or its relay, before it begins. Once the child has ended, the supervisor ends
these, so that others take over at once; see `docs/design/ownership.md`.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Final

import typer

from mqlayer.cli.errors import REFUSED_CODE
from mqlayer.cli.supervisor_pipe import JOINING, NUMBER_VARIABLE, PIPE_VARIABLE, RELAYING, STARTED, WAKE
from mqlayer.groups.members import MemberSession
from mqlayer.health import Health, Liveness
from mqlayer.logs import event_logger
from mqlayer.randomness import RNG

log = event_logger(__name__)

READ_SIZE: Final = 65_536
POLL_INTERVAL_S: Final = 0.1
FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 30.0
KILLED_WITHIN_S: Final = 5.0
"""The kernel ends a killed process in no time, unless a disk holds it."""
STUCK_AFTER_S: Final = 30.0
STEADY_AFTER_S: Final = 60.0
"""After so long, the wait starts anew."""
JOINING_SPACES: Final = 3

Ended = Callable[[Collection[MemberSession | str]], None]
"""Gets what a process named that has ended: its members' sessions, its relay's id."""


class Child:
    """A slot for a process. `ended` gets what one that has ended named."""

    def __init__(self, start: Callable[[socket.socket], subprocess.Popen[bytes]], ended: Ended) -> None:
        self._start, self._ended = start, ended
        self._unread = b""
        self._named: dict[object, MemberSession | str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: socket.socket | None = None
        self._began = self._restart_at = 0.0
        self._ends = 0
        self._started = self.ever_started = self._told = self.refused = False

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if there is a process."""
        if self._process is not None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Send SIGTERM once: a second one would kill running handlers."""
        if not self._told:
            self._told = True
            self.send(signal.SIGTERM)
        # A process under SIGSTOP reacts only after SIGCONT.
        self.send(signal.SIGCONT)

    def replace(self) -> None:
        """Have `check` start a new process at once; the former one has ended."""
        self.close()
        self._process, self._restart_at, self._ends = None, 0.0, 0

    @property
    def serves(self) -> bool:
        """Whether the process reported its start. Thread-safe."""
        return self._process is not None and self._started

    @property
    def ever_ended(self) -> bool:
        """Whether a process of this slot has ended."""
        return self._ends > 0

    def check(self, now: float) -> None:
        """Note a start or end; start a process when due."""
        if self._process is None:
            if now >= self._restart_at:
                self._begin(now)
            return
        code = self._process.poll()
        self._listen()
        if code is not None:
            self._note_end(code, now)

    def join(self, timeout_s: float) -> None:
        """Wait until the process has ended."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)

    def wake(self) -> None:
        """Tell the process that work of another one is free. Thread-safe."""
        pipe = self._pipe
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.send(WAKE)

    def close(self) -> None:
        """Close the pipe; hand over what a process that has ended named."""
        # All threads of a process have ended before it can be waited for.
        has_ended = self._process is not None and not self.running
        if self._pipe is not None:
            self._listen()
            self._pipe.close()
            self._pipe = None
        if has_ended and self._named:
            self._ended(tuple(self._named.values()))
        self._named, self._unread = {}, b""

    def _begin(self, now: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = self._start(theirs)
        ours.setblocking(False)
        self._pipe, self._began, self._started, self._told = ours, now, False, False

    def _listen(self) -> None:
        if self._pipe is None:
            return
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while read := self._pipe.recv(READ_SIZE):
                *lines, self._unread = (self._unread + read).split(b"\n")
                for line in lines:
                    self._note(line)

    def _note(self, line: bytes) -> None:
        if line == STARTED and self._process is not None:
            self._started = self.ever_started = True
            log.info("process_started", extra={"pid": self._process.pid})
        # A line that was cut off fits nothing.
        elif line.startswith(JOINING + b" ") and line.count(b" ") == JOINING_SPACES:
            _, group, member, session = line.decode().split(" ")
            if group.isdecimal() and session.isdecimal():
                self._named[int(group), member] = MemberSession(int(group), member, int(session))
        elif line.startswith(RELAYING + b" "):
            self._named[RELAYING] = line.decode().partition(" ")[2]

    def _note_end(self, code: int, now: float) -> None:
        pid = self._process.pid if self._process is not None else 0
        self.refused = code == REFUSED_CODE
        self.close()
        self._process = None
        facts: dict[str, object] = {"pid": pid, **how_it_ended(code)}
        self._ends = 1 if self._started and now - self._began >= STEADY_AFTER_S else self._ends + 1
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (self._ends - 1)) * RNG.uniform(0.8, 1.0)
        self._restart_at = now + wait_s
        event = "process_died" if self._started else "process_did_not_start"
        log.error(event, extra=facts | {"again_in_s": round(wait_s, 1)})


class Supervisor:
    """Several processes of one command."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        count: int,
        environment: Mapping[str, str],
        stop_limit_s: float,
        changed: Callable[[], bool] | None = None,
        ended: Ended = lambda _: None,
    ) -> None:
        """`changed`: asked in each turn whether to replace all processes; it then never gives up.

        `ended` gets what each process named that has ended; it must not wait.
        """
        self._changed = changed
        self._command, self._environment, self._stop_limit_s = list(command), dict(environment), stop_limit_s
        self._children = [Child(partial(self._start, number), ended) for number in range(1, count + 1)]
        self._liveness, self._stopping = Liveness(), False

    def health(self) -> Health:
        """Report stalls and children that have not started. Thread-safe."""
        waits = [f"process {n} has not started" for n, child in enumerate(self._children, 1) if not child.serves]
        if self._stopping:
            waits = ["it is stopping"]
        return Health(self._liveness.stuck("the supervisor", STUCK_AFTER_S), tuple(waits))

    @property
    def refused(self) -> bool:
        """Whether a process ended because its code is too old."""
        return any(child.refused for child in self._children)

    def wake(self) -> None:
        """Tell all processes that work of an ended one is free. Thread-safe."""
        for child in self._children:
            child.wake()

    def run(self) -> bool:
        """Run until SIGTERM or SIGINT, in the main thread; False when no child could start or one was killed.

        A second signal, or the stop limit, kills the children. Ends with exit code 78 when one's code is too old: no
        restart would help.
        """
        with _signals() as signals:
            try:
                able = self._watch(signals)
            finally:
                ended = self._stop(signals)
        if self.refused:
            raise typer.Exit(REFUSED_CODE)
        return able and ended

    def _watch(self, signals: Signals) -> bool:
        while not signals.wait(POLL_INTERVAL_S):
            self._liveness.note_turn()
            if self._changed is not None and self._changed() and not self._replace(signals):
                return True
            for child in self._children:
                child.check(time.monotonic())
            if self.refused:
                log.error("code_too_old", extra={"count": len(self._children)})
                return False
            if self._changed is None and all(c.ever_ended and not c.ever_started for c in self._children):
                log.error("no_process_started", extra={"count": len(self._children)})
                return False
        return True

    def _replace(self, signals: Signals) -> bool:
        """Return False if a signal came meanwhile."""
        log.info("reloading", extra={"count": len(self._children)})
        until = time.monotonic() + self._stop_limit_s
        for child in self._children:
            child.end()
        while any(child.running for child in self._children):
            self._liveness.note_turn()
            if signals.wait(POLL_INTERVAL_S):
                return False
            if time.monotonic() >= until:
                self._kill()
        for child in self._children:
            child.replace()
        return True

    def _stop(self, signals: Signals) -> bool:
        self._stopping = True
        until = time.monotonic() + self._stop_limit_s
        for child in self._children:
            child.end()
        while any(child.running for child in self._children):
            self._liveness.note_turn()
            if signals.wait(POLL_INTERVAL_S) or time.monotonic() >= until:
                self._kill()
                return False
        for child in self._children:
            child.close()
        return True

    def _kill(self) -> None:
        log.error("processes_killed", extra={"count": sum(child.running for child in self._children)})
        for child in self._children:
            child.send(signal.SIGKILL)
        for child in self._children:
            child.join(KILLED_WITHIN_S)
            child.close()

    def _start(self, number: int, pipe: socket.socket) -> subprocess.Popen[bytes]:
        descriptor = pipe.fileno()
        # In a new session, Ctrl-C reaches the supervisor alone.
        return subprocess.Popen(
            self._command,
            env={**self._environment, PIPE_VARIABLE: str(descriptor), NUMBER_VARIABLE: str(number)},
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


class Signals:
    """Queue of SIGTERM and SIGINT, and of the ends of children."""

    def __init__(self) -> None:
        # SimpleQueue.put is reentrant, so a signal handler may call it.
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Queue a signal."""
        self._came.put(number)

    def wait(self, timeout_s: float) -> bool:
        """Take the next signal; False at the timeout, or once a child has ended."""
        try:
            return self._came.get(timeout=timeout_s) != signal.SIGCHLD
        except queue.Empty:
            return False


def how_it_ended(code: int) -> dict[str, object]:
    """Return a process's end as log fields."""
    return {"exit_code": code} if code >= 0 else {"signal": signal.Signals(-code).name}


@contextlib.contextmanager
def _signals() -> Iterator[Signals]:
    signals = Signals()
    before = {number: signal.signal(number, signals.note) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
