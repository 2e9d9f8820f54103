"""Compares predictions with the measured curves."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from bench.growth.points import Curve, Setup
from bench.model import costs
from bench.model.predict import Layout, consumed, latencies, predict, published

CORES: Final = 2
CALL_BYTES: Final = 32_000_000
"""Of a call that publishes, in `bench.growth.measure`."""
CLOSE: Final = 0.3
"""The same step differs by as much from run to run."""
SOURCES: Final = {"partitions 1,000", "bodies 65,536", "groups 50", "processes 8 waiting"}
"""Steps that the constants come from: their errors say little."""


class Compared(NamedTuple):
    """One figure of one step."""

    step: str
    figure: str
    predicted: float
    measured: float
    bottleneck: str
    source: bool

    @property
    def error(self) -> float:
        """How much higher the prediction is, as a share."""
        return self.predicted / self.measured - 1

    def row(self) -> tuple[str, ...]:
        """Return it in columns."""
        digits = 1 if self.figure.endswith("ms") else 0
        numbers = (f"{value:,.{digits}f}" for value in (self.predicted, self.measured))
        return (self.step, self.figure, *numbers, f"{self.error:+.0%}", self.bottleneck + " (set)" * self.source)


def layout_of(setup: Setup) -> Layout:
    """Return a measured configuration as a layout: all on one machine."""
    return Layout(
        rate=setup.rate,
        body_bytes=setup.body_bytes,
        keys=setup.keys,
        nodes=setup.nodes,
        partitions=setup.partitions,
        groups=setup.groups,
        groups_per_process=setup.groups,
        members=setup.processes,
        concurrency=setup.concurrency,
        handler_ms=setup.wait_ms,
        cores=CORES,
        call=min(costs.PUBLISHED_AT_ONCE, setup.messages, max(1, CALL_BYTES // setup.body_bytes)),
    )


def compare(curves: Mapping[str, Curve]) -> list[Compared]:
    """Predict each measured figure."""
    found = []
    for curve in curves.values():
        for series in curve.series:
            for point in series.points:
                layout, value = layout_of(point.setup), getattr(point.setup, curve.axis)
                name = f"{curve.name} {value:,}" + (" waiting" if point.setup.wait_ms else "")
                ours, theirs = published(layout), consumed(layout)
                p50, p99 = latencies(layout, layout.rate / predict(layout).throughput)
                found += [
                    Compared(name, figure, predicted, measured, part, name in SOURCES)
                    for figure, predicted, measured, part in (
                        ("published/s", ours.capacity, point.publish, ours.name),
                        ("handled/s", theirs.capacity * layout.groups, point.consume, theirs.name),
                        ("p50 ms", p50, point.p50_ms, ""),
                        ("p99 ms", p99, point.p99_ms, ""),
                    )
                ]
    return found


def summary(found: Sequence[Compared]) -> Iterator[tuple[str, ...]]:
    """Yield the errors of each figure, without the steps that constants come from."""
    yield ("figure", "median error", "within 30%", "highest", "lowest")
    for figure in figures_of(found):
        tested = [one for one in found if one.figure == figure and not one.source]
        errors = [abs(one.error) for one in tested]
        ends = max(tested, key=lambda one: one.error), min(tested, key=lambda one: one.error)
        within = sum(error <= CLOSE for error in errors)
        yield (
            figure,
            f"{statistics.median(errors):.0%}",
            f"{within} of {len(errors)}",
            *(f"{one.error:+.0%} at {one.step}" for one in ends),
        )


def by_curve(found: Sequence[Compared]) -> Iterator[tuple[str, ...]]:
    """Yield each step's errors: a row per step, a column per figure."""
    figures = figures_of(found)
    yield ("step", *figures, "bottleneck of publishing, handling")
    for step in dict.fromkeys(one.step for one in found):
        of_step = [one for one in found if one.step == step]
        parts = ", ".join(one.bottleneck for one in of_step if one.bottleneck)
        yield (step, *(f"{one.error:+.0%}" for one in of_step), parts + " (set)" * of_step[0].source)


def figures_of(found: Sequence[Compared]) -> list[str]:
    """Return the names of the compared figures."""
    return list(dict.fromkeys(one.figure for one in found))
