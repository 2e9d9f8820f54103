"""Processes that outlive their starter, and are never confused with a later owner of their pid."""

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
    """A pid with the start time that the kernel gave it, which a later owner of the pid doesn't share."""

    pid: int
    started: str


# Children of this process stay referenced until they ended: so each is reaped, and none is left as a zombie.
_children: Final[dict[ProcessId, subprocess.Popen[bytes]]] = {}


def spawn(
    command: Sequence[str | Path],
    *,
    log: Path,
    account: Account | None = None,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> ProcessId:
    """Start a process in a session of its own, its output appended to ``log``.

    It lives on when this process ends. With an account it runs under that account and no other group. Its log and the
    files that it makes are for its account only.
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
    """Return the identity of the process that has the pid now."""
    return ProcessId(pid, _started(pid) or "")


def is_running(process: ProcessId) -> bool:
    """Return whether the very process is alive: not ended, not a zombie, not another with its pid."""
    child = _children.get(process)
    if child is None:
        return process.started != "" and _started(process.pid) == process.started
    # A child of ours has ended only when it was reaped: until then its pid looks alive to others.
    if child.poll() is None:
        return True
    _children.pop(process, None)
    return False


def send(process: ProcessId, number: signal.Signals) -> None:
    """Send a signal to the very process; one that ended is left alone."""
    if is_running(process):
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return


def ends(process: ProcessId, *, within_s: float) -> bool:
    """Return whether the process ended within the time given."""
    return comes_true(lambda: not is_running(process), within_s=within_s)


def stop(process: ProcessId, *, by: signal.Signals = signal.SIGTERM, within_s: float = 30.0) -> bool:
    """Ask the process to end, kill it when it doesn't, and return whether it went by itself."""
    send(process, by)
    # A stopped process reads its signals only once it goes on.
    send(process, signal.SIGCONT)
    if ends(process, within_s=within_s):
        return True
    kill(process)
    return False


def kill(process: ProcessId) -> None:
    """End the process with SIGKILL and wait until it is gone."""
    send(process, signal.SIGKILL)
    ends(process, within_s=30.0)


def children_of(process: ProcessId) -> list[ProcessId]:
    """Return the direct children, as far as the system tells (Linux)."""
    found = []
    for tasks in Path(f"/proc/{process.pid}/task").glob("*/children"):
        for pid in _read(tasks).split():
            started = _started(int(pid))
            if started is not None:
                found.append(ProcessId(int(pid), started))
    return found


def last_lines(log: Path, count: int = 5) -> str:
    """Return the end of a log, for an error message."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


def _started(pid: int) -> str | None:
    """Return when a living process started, in whatever form the system gives, or None."""
    if Path("/proc/self/stat").exists():
        return _started_by_proc(pid)
    return _started_by_ps(pid)


def _started_by_proc(pid: int) -> str | None:
    stat = _read(Path(f"/proc/{pid}/stat"))
    # The second field, the program's name in parentheses, may itself hold blanks and parentheses.
    fields = stat.rpartition(")")[2].split()
    # Other threads may outlive the first one, and hold its files and ports open until they end as well.
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
