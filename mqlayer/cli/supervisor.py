"""Several processes of one command: started, watched, started again, stopped together.

A child and its supervisor share a line. The child says there that it has started; the end of the line tells the child
that its supervisor is gone, so that no child outlives it, not even after SIGKILL.

States of a child: *starting* -> *started* -> *ended*; from there, unless we are stopping, *starting* again after a wait
that grows while it keeps ending. When all have ended and none ever started, the configuration can't work: we give up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Final

from mqlayer.health import Health, Liveness

log = logging.getLogger(__name__)

PIPE_VARIABLE: Final = "MQLAYER_SUPERVISOR_FD"
NUMBER_VARIABLE: Final = "MQLAYER_SUPERVISOR_NUMBER"
STARTED: Final = b"s"
POLL_INTERVAL_S: Final = 0.1
FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 30.0
STUCK_AFTER_S: Final = 30.0
STEADY_AFTER_S: Final = 60.0
"""A child that served this long is not one that keeps ending."""


class SupervisorPipe:
    """A child's end of the line to its supervisor; `number` says which of its children it is, from 1 on."""

    def __init__(self, pipe: socket.socket, number: int) -> None:
        self._pipe, self.number = pipe, number

    @classmethod
    def from_environment(cls) -> SupervisorPipe | None:
        """Return the line, or None in a process that has no supervisor. The variable is used up."""
        descriptor, number = os.environ.pop(PIPE_VARIABLE, ""), os.environ.pop(NUMBER_VARIABLE, "")
        if not descriptor:
            return None
        pipe = socket.socket(fileno=int(descriptor))
        pipe.set_inheritable(False)
        return cls(pipe, int(number or 1))

    def report_started(self) -> None:
        """Tell the supervisor that this process serves."""
        with contextlib.suppress(OSError):
            self._pipe.sendall(STARTED)

    def watch(self) -> None:
        """Send SIGTERM to this process when the supervisor is gone."""
        threading.Thread(target=self._watch, name="mqlayer-supervisor-line", daemon=True).start()

    def _watch(self) -> None:
        with contextlib.suppress(OSError):
            while self._pipe.recv(1):
                pass
        log.warning("supervisor_gone")
        os.kill(os.getpid(), signal.SIGTERM)


class Child:
    """One place in the set of processes, and the process that is in it now."""

    def __init__(self, start: Callable[[socket.socket], subprocess.Popen[bytes]]) -> None:
        self._start = start
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: socket.socket | None = None
        self._began = self._restart_at = 0.0
        self._ends = 0
        self._started = self.ever_started = False

    @property
    def running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None and self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal; to a process that ended, nothing."""
        if self._process is not None:
            self._process.send_signal(number)

    @property
    def serves(self) -> bool:
        """Whether the process that is in this place has said so. For any thread."""
        return self._process is not None and self._started

    @property
    def ever_ended(self) -> bool:
        """Whether a process in this place has ended."""
        return self._ends > 0

    def check(self, now: float) -> None:
        """Take in what happened to the process; start one where it is time."""
        if self._process is None:
            if now >= self._restart_at:
                self._begin(now)
            return
        code = self._process.poll()
        self._listen()
        if code is not None:
            self._note_end(code, now)

    def close(self) -> None:
        """Let the line go."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def _begin(self, now: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = self._start(theirs)
        ours.setblocking(False)
        self._pipe, self._began, self._started = ours, now, False

    def _listen(self) -> None:
        if self._pipe is None or self._started:
            return
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            if self._pipe.recv(1) == STARTED and self._process is not None:
                self._started = self.ever_started = True
                log.info("process_started", extra={"pid": self._process.pid})

    def _note_end(self, code: int, now: float) -> None:
        pid = self._process.pid if self._process is not None else 0
        self._process = None
        self.close()
        facts: dict[str, object] = {"pid": pid, **how_it_ended(code)}
        self._ends = 1 if self._started and now - self._began >= STEADY_AFTER_S else self._ends + 1
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (self._ends - 1)) * random.uniform(0.8, 1.0)
        self._restart_at = now + wait_s
        event = "process_died" if self._started else "process_did_not_start"
        log.error(event, extra=facts | {"again_in_s": round(wait_s, 1)})


class Supervisor:
    """A number of processes of one command."""

    def __init__(
        self, command: Sequence[str], *, count: int, environment: Mapping[str, str], stop_limit_s: float
    ) -> None:
        self._command, self._environment, self._stop_limit_s = list(command), dict(environment), stop_limit_s
        self._children = [Child(partial(self._start, number)) for number in range(1, count + 1)]
        self._liveness, self._stopping = Liveness(), False

    def health(self) -> Health:
        """Say whether it watches its children, and whether each of them has started. For any thread.

        How a child is from then on, it says itself.
        """
        waits = [f"process {n} has not started" for n, child in enumerate(self._children, 1) if not child.serves]
        if self._stopping:
            waits = ["it is stopping"]
        return Health(self._liveness.stuck("the supervisor", STUCK_AFTER_S), tuple(waits))

    def run(self) -> bool:
        """Run until SIGTERM or SIGINT; False when no process could be started at all, or one had to be killed.

        For the main thread. The children get SIGTERM and are waited for; a second signal kills them.
        """
        with _signals() as signals:
            try:
                able = self._watch(signals)
            finally:
                ended = self._stop(signals)
        return able and ended

    def _watch(self, signals: Signals) -> bool:
        while not signals.wait(POLL_INTERVAL_S):
            self._liveness.note_turn()
            for child in self._children:
                child.check(time.monotonic())
            if all(c.ever_ended and not c.ever_started for c in self._children):
                log.error("no_process_started", extra={"count": len(self._children)})
                return False
        return True

    def _stop(self, signals: Signals) -> bool:
        """End all children; True when each ended by itself."""
        self._stopping = True
        until = time.monotonic() + self._stop_limit_s
        for child in self._children:
            child.send(signal.SIGTERM)
            # A stopped process reads its signals only once it goes on.
            child.send(signal.SIGCONT)
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
            child.close()

    def _start(self, number: int, pipe: socket.socket) -> subprocess.Popen[bytes]:
        descriptor = pipe.fileno()
        # A session of its own: Ctrl-C reaches the supervisor alone, which passes it on once.
        return subprocess.Popen(
            self._command,
            env={**self._environment, PIPE_VARIABLE: str(descriptor), NUMBER_VARIABLE: str(number)},
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


class Signals:
    """SIGTERM and SIGINT of this process, taken one by one."""

    def __init__(self) -> None:
        # Of the standard library's ways to wake a thread, the one that a signal handler may use at any moment.
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Keep one."""
        self._came.put(number)

    def wait(self, timeout_s: float) -> bool:
        """Take the next one; False when none came in time."""
        try:
            self._came.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True


def how_it_ended(code: int) -> dict[str, object]:
    """Return a process's end as fields for the log."""
    return {"exit_code": code} if code >= 0 else {"signal": signal.Signals(-code).name}


@contextlib.contextmanager
def _signals() -> Iterator[Signals]:
    signals = Signals()
    before = {number: signal.signal(number, signals.note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
