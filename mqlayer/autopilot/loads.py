"""Loads of partitions from samples: pure rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

HOLE_S: Final = 45.0
"""A longer time between samples breaks a history."""
BACKLOG_LEAST: Final = 100
"""A shorter backlog does not show that a group is at its limit."""
DEFAULT_CAPACITY_PER_S: Final = 2_500.0
"""Of a partition that no group was too slow for yet: one fenced row per message in one process."""


class LoadSample(NamedTuple):
    """A partition's end, and the slowest group's settled offset, at a time in seconds."""

    at: float
    next_offset: int
    settled: int

    @property
    def lag(self) -> int:
        """Messages left to the slowest group."""
        return max(0, self.next_offset - self.settled)


class Times(NamedTuple):
    """Seconds: of a window; of the look back for merges; from a change to its judgement; of sampling LPs."""

    window_s: float = 10.0
    look_back_s: float = 300.0
    settle_s: float = 20.0
    sample_s: float = 2.0
    gap_s: float = 4.0
    """Least time between two samples."""
    drain_s: float = 600.0
    """A judgement waits so long for parents to be drained."""
    again_s: float = 30.0
    """Least time between two samples of a partition's LPs."""


TIMES: Final = Times()


class LoadFigures(NamedTuple):
    """A partition's load. `per_s`: in the last window, None: not known yet; `peak_per_s`: in any window looked at."""

    per_s: float | None = None
    peak_per_s: float = 0.0
    is_whole: bool = False
    """The samples span the whole look back."""
    lag: int = 0
    served_per_s: float = 0.0
    limit_per_s: float | None = None
    """The most that the slowest group settled in a window with a backlog all along."""


def load_figures(samples: Sequence[LoadSample], times: Times) -> LoadFigures:
    """Return the load by samples, the newest first."""
    if not samples:
        return LoadFigures()
    whole = list(_unbroken(samples))
    known = [one for one in whole if one.at >= whole[0].at - times.look_back_s - times.window_s]
    windows = [window for at in range(len(known)) if (window := _window(known, at, times.window_s))]
    limits = [_served(window) for window in windows if _has_backlog(window)]
    return LoadFigures(
        per_s=_grown(windows[0]) if windows and windows[0][0] is known[0] else None,
        peak_per_s=max(map(_grown, windows), default=0.0),
        is_whole=known[0].at - known[-1].at >= times.look_back_s,
        lag=known[0].lag,
        served_per_s=_served(windows[0]) if windows else 0.0,
        limit_per_s=max(limits, default=None),
    )


def _unbroken(samples: Sequence[LoadSample]) -> Iterator[LoadSample]:
    yield samples[0]
    for later, earlier in pairwise(samples):
        if later.at - earlier.at > HOLE_S:
            return
        yield earlier


def _window(samples: Sequence[LoadSample], at: int, window_s: float) -> Sequence[LoadSample]:
    """Return the shortest run of samples from `at` that fills a window, else none."""
    for past in range(at + 1, len(samples)):
        if samples[at].at - samples[past].at >= 0.95 * window_s:
            return samples[at : past + 1]
    return ()


def _grown(window: Sequence[LoadSample]) -> float:
    return max(0, window[0].next_offset - window[-1].next_offset) / (window[0].at - window[-1].at)


def _served(window: Sequence[LoadSample]) -> float:
    return max(0, window[0].settled - window[-1].settled) / (window[0].at - window[-1].at)


def _has_backlog(window: Sequence[LoadSample]) -> bool:
    """Whether a group with members was at its limit: at each sample it had a second's work left."""
    served = _served(window)
    return served >= 1.0 and all(one.lag >= max(BACKLOG_LEAST, served) for one in window)
