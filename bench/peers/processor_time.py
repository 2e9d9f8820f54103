"""The processor time of servers, of which each may have many processes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
# utime, stime, cutime, cstime: the last two are of children that have ended and were waited for.
TIMES: Final = slice(11, 15)


def used_by(pids: Iterable[int]) -> float:
    """Return the seconds of these processes and all below them, ended ones too; NaN where there is no /proc."""
    if not PROC.is_dir():
        return float("nan")
    every = {below for pid in pids for below in tree(pid)}
    ticks = sum(sum(times_of(pid)) for pid in every)
    return ticks / os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> Iterator[int]:
    """Yield a process and all below it."""
    yield pid
    for children in PROC.glob(f"{pid}/task/*/children"):
        try:
            found = children.read_text().split()
        except OSError:
            continue
        for child in found:
            yield from tree(int(child))


def times_of(pid: int) -> list[int]:
    """Return a process's four times in ticks; nothing of one that has ended."""
    try:
        # The name may have spaces and brackets.
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [int(ticks) for ticks in fields[TIMES]]
