"""What a process and its supervisor say to each other."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mqlayer.logs import event_logger

if TYPE_CHECKING:
    from mqlayer.groups.members import MemberSession

log = event_logger(__name__)

PIPE_VARIABLE: Final = "MQLAYER_SUPERVISOR_FD"
NUMBER_VARIABLE: Final = "MQLAYER_SUPERVISOR_NUMBER"
STARTED: Final = b"started"
JOINING: Final = b"joining"
RELAYING: Final = b"relaying"
WAKE: Final = b"w"


class SupervisorPipe:
    """A child's end of its socket pair."""

    def __init__(self, pipe: socket.socket, number: int) -> None:
        self._pipe, self.number = pipe, number
        self._woken: Callable[[], None] = lambda: None

    @classmethod
    def from_environment(cls) -> SupervisorPipe | None:
        """Return the pipe, or None; removes the variables."""
        descriptor, number = os.environ.pop(PIPE_VARIABLE, ""), os.environ.pop(NUMBER_VARIABLE, "")
        if not descriptor:
            return None
        pipe = socket.socket(fileno=int(descriptor))
        pipe.set_inheritable(False)
        return cls(pipe, int(number or 1))

    def report_started(self) -> None:
        """Report that this process serves."""
        self._send(STARTED)

    def report_joining(self, session: MemberSession) -> None:
        """Report a member's session before it begins."""
        self._send(b"%s %d %s %d" % (JOINING, session.group_id, session.member_id.encode(), session.session))

    def report_relaying(self, relay_id: str) -> None:
        """Report a relay before it begins."""
        self._send(b"%s %s" % (RELAYING, relay_id.encode()))

    def watch(self, woken: Callable[[], None] = lambda: None) -> None:
        """Send SIGTERM to this process when its supervisor ends. `woken`: called when work of another one is free."""
        self._woken = woken
        threading.Thread(target=self._watch, name="mqlayer-supervisor-line", daemon=True).start()

    def _send(self, line: bytes) -> None:
        # Never wait for a supervisor that reads nothing: of a session that it doesn't know, the lease ends.
        with contextlib.suppress(OSError):
            self._pipe.send(line + b"\n", socket.MSG_DONTWAIT)

    def _watch(self) -> None:
        with contextlib.suppress(OSError):
            while self._pipe.recv(1):
                self._woken()
        log.warning("supervisor_gone")
        os.kill(os.getpid(), signal.SIGTERM)
