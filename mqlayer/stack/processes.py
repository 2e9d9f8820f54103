"""Processes that outlive their starter; reused pids are recognized."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqlayer.stack.accounts import Account, run_as
from mqlayer.stack.private_files import UMASK, open_closed
from mqlayer.stack.wait import comes_true


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A pid with its process's start time."""

    pid: int
    started: str


# Popen objects stay referenced until their end, so that each child is reaped.
_children: Final[dict[ProcessId, subprocess.Popen[bytes]]] = {}


def spawn(
    command: Sequence[str | Path],
    *,
    log: Path,
    account: Account | None = None,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> ProcessId:
    """Start a process in a new session, output appended to `log`.

    It survives this process; its files are private.
    """
    with open(log, "ab", opener=open_closed) as output:
        child = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=None if environment is None else {**os.environ, **environment},
            start_new_session=True,
            umask=UMASK,
            **run_as(account),
        )
    process = identify(child.pid)
    _children[process] = child
    return process


def identify(pid: int) -> ProcessId:
    """Return the identity of a pid's current process."""
    return ProcessId(pid, _started(pid) or "")


def is_running(process: ProcessId) -> bool:
    """Return whether this very process lives; zombies do not."""
    child = _children.get(process)
    if child is None:
        return process.started != "" and _started(process.pid) == process.started
    # An own child stays a zombie until poll() reaps it.
    if child.poll() is None:
        return True
    _children.pop(process, None)
    return False


def send(process: ProcessId, number: signal.Signals) -> None:
    """Signal this very process, if alive."""
    if is_running(process):
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return


def ends(process: ProcessId, *, within_s: float) -> bool:
    """Return whether the process ends in time."""
    return comes_true(lambda: not is_running(process), within_s=within_s)


def stop(process: ProcessId, *, by: signal.Signals = signal.SIGTERM, within_s: float = 30.0) -> bool:
    """Signal, then kill after `within_s`; False if killed."""
    send(process, by)
    # A process under SIGSTOP reacts only after SIGCONT.
    send(process, signal.SIGCONT)
    if ends(process, within_s=within_s):
        return True
    kill(process)
    return False


def kill(process: ProcessId) -> None:
    """Kill the process and wait for its end."""
    send(process, signal.SIGKILL)
    ends(process, within_s=30.0)


def children_of(process: ProcessId) -> list[ProcessId]:
    """Return direct children; Linux only."""
    found = []
    for tasks in Path(f"/proc/{process.pid}/task").glob("*/children"):
        for pid in _read(tasks).split():
            started = _started(int(pid))
            if started is not None:
                found.append(ProcessId(int(pid), started))
    return found


def last_lines(log: Path, count: int = 5) -> str:
    """Return a log's last lines."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


def _started(pid: int) -> str | None:
    if Path("/proc/self/stat").exists():
        return _started_by_proc(pid)
    return _started_by_ps(pid)


def _started_by_proc(pid: int) -> str | None:
    stat = _read(Path(f"/proc/{pid}/stat"))
    # The second field, the name in parentheses, may contain blanks and parentheses.
    fields = stat.rpartition(")")[2].split()
    # Threads may outlive the main one, and keep files and ports open.
    if not fields or (fields[0] in {"Z", "X"} and int(fields[17]) <= 1):
        return None
    return fields[19]


def _started_by_ps(pid: int) -> str | None:
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    state, _, started = answer.stdout.strip().partition(" ")
    return started.strip() if started and not state.startswith("Z") else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
