"""What trees of processes need: resident memory at most, and processor time, by reading /proc."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self

SAMPLE_S: Final = 0.5
PAGE_MB: Final = os.sysconf("SC_PAGE_SIZE") / 1e6
TICKS: Final = os.sysconf("SC_CLK_TCK")


class ProcessStat(NamedTuple):
    """A process; `cpu_s` counts its ended children too."""

    parent: int
    cpu_s: float
    mb: float


def processes() -> dict[int, ProcessStat]:
    """Return all processes of the machine."""
    found = dict[int, ProcessStat]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks = sum(map(int, words[11:15]))
        found[int(stat.parent.name)] = ProcessStat(int(words[1]), ticks / TICKS, int(words[21]) * PAGE_MB)
    return found


def tree(roots: Iterable[int], there: dict[int, ProcessStat]) -> list[ProcessStat]:
    """Return the processes that descend from some, with these."""
    children = dict[int, list[int]]()
    for pid, one in there.items():
        children.setdefault(one.parent, []).append(pid)
    pids = list(roots)
    for pid in pids:
        pids += children.get(pid, [])
    return [there[pid] for pid in pids if pid in there]


class TreeWatch(threading.Thread):
    """Watches trees, by name, until `close`: `peaks` holds the most MB of each since `reset`.

    Resident memory: pages that forked processes share count for each.
    """

    def __init__(self, roots: Callable[[], dict[str, Sequence[int]]]) -> None:
        super().__init__(daemon=True)
        self._roots, self._ended = roots, threading.Event()
        self.peaks: dict[str, float] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            there = processes()
            for name, roots in self._roots().items():
                mb = sum(one.mb for one in tree(roots, there))
                self.peaks[name] = max(self.peaks.get(name, 0.0), mb)

    def reset(self) -> None:
        """Forget the peaks."""
        self.peaks = {}

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time of each tree up to now."""
        there = processes()
        return {name: sum(one.cpu_s for one in tree(roots, there)) for name, roots in self._roots().items()}
