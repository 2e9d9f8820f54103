"""What a bench is, and the ones there are."""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal

import msgspec

from bench.stage import Stage


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One result: ours, the baseline in the same unit, ours to baseline, and what is aimed at (for the ratio, unless
    the bench says otherwise). `baseline` and `ratio` are None where there is nothing to compare with."""

    name: str
    value: float
    unit: str
    baseline: float | None
    ratio: float | None
    target: float | None


Direction = Literal["higher", "lower", "neither"]

BETTER: Final[dict[str, Direction]] = {
    **dict.fromkeys(
        ("MB/s", "messages/s", "msg/s", "msg/s at the end", "records/s", "rows/s", "transactions/s"), "higher"
    ),
    **dict.fromkeys(
        ("ms", "ms longest gap", "ms longest pause", "ms p50", "ms p95", "ms p99", "s", "us per message"), "lower"
    ),
    **dict.fromkeys(("B", "MB", "MB at most", "MB peak", "connections"), "lower"),
    # Work that the same members make: by the second, as it comes from their heartbeats.
    **dict.fromkeys(("CPU s/s", "heartbeats", "in 1,000 stop", "kB/s", "statements/s"), "lower"),
    **dict.fromkeys(("1/s", "changes"), "neither"),
    # How far a simulation is from what happened.
    **dict.fromkeys(("messages apart", "changes apart"), "lower"),
}
"""By unit: which figures are better. A ratio to a baseline of that unit goes the same way."""

Bench = Callable[[Stage], Iterator[Line]]

BENCHES: Final[dict[str, Bench]] = {}


def bench(name: str) -> Callable[[Bench], Bench]:
    """Register a bench under its name."""

    def register(function: Bench) -> Bench:
        BENCHES[name] = function
        return function

    return register


def compared(name: str, ours: float, baseline: float, *, unit: str, target: float | None) -> Line:
    """Return a line with the ratio of ours to the baseline."""
    return Line(
        name=name,
        value=round(ours, 3),
        unit=unit,
        baseline=round(baseline, 3),
        ratio=round(ours / baseline, 3),
        target=target,
    )


def in_turn(rounds: int, contestants: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Run the contestants in turn, so many rounds after one that does not count; return each one's median figure.

    In turn, because a machine's speed drifts: what is compared must have run side by side.
    """
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, run in contestants.items():
            figure = run()
            if turn:
                figures[name].append(figure)
                note(f"  {name}: {figure:,.1f}")
    return {name: statistics.median(values) for name, values in figures.items()}


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Hide the objects made so far from the collector, as `mqlayer consume` does; the baseline gains by it too."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        # Benches that run after this one in the process shall find the collector as it was.
        gc.unfreeze()


def note(text: str) -> None:
    """Show progress, away from the results."""
    sys.stderr.write(text + "\n")
