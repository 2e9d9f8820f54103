"""Throughput and latency as processes, nodes, partitions, groups, keys, bodies and backlogs grow."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.growth.curves import LONG, PLANS, Plan
from bench.growth.measure import measure
from bench.growth.points import Curve, Point, Series, Setup, keep_curve
from bench.registry import Line, bench, note
from bench.stage import Stage

WANTED: Final = tuple(name for name in os.environ.get("BENCH_CURVES", "").split(",") if name) or tuple(PLANS)
WARM_UP: Final = 10_000
FILE: Final = os.environ.get("BENCH_FILE", "")


@bench("scale")
def scale(stage: Stage) -> Iterator[Line]:
    """Messages per second that a producer publishes and processes consume out of a backlog, and p99 from publishing to
    the handler at a fixed rate, per step of each curve; the baseline is the curve's first step.

    `BENCH_CURVES=nodes,keys` takes some of the curves, `BENCH_LONG=1` the steps of ten million too, `only` those
    alone, and `BENCH_FILE` names a JSON file that keeps the points: `python -m bench.growth` draws them."""
    unknown = [name for name in WANTED if name not in PLANS]
    if unknown:
        raise ValueError(f"no curve {', '.join(unknown)}; there are: {', '.join(PLANS)}")
    # Servers that have just started are slower.
    measure(stage, Setup(messages=WARM_UP))
    for name in WANTED:
        note(f"  {name}")
        yield from curve_of(stage, PLANS[name])


def curve_of(stage: Stage, plan: Plan) -> Iterator[Line]:
    """Measure a curve, yield two lines per step, and keep its points."""
    series: dict[str, Series] = {}
    began, load = time.gmtime(), os.getloadavg()[0]
    for name, setup in plan.setups():
        point = measure(stage, setup)
        points = series.setdefault(name, Series(name=name, points=[])).points
        points.append(point)
        step = f"{getattr(setup, plan.axis)}" + (f", {name}" if len(plan.series) > 1 else "")
        yield from lines(f"scale[{plan.name}={step}", point, points[0])
    if FILE and series:
        curve = Curve(
            name=plan.name,
            axis=plan.axis,
            title=plan.title,
            series=list(series.values()),
            machine=f"{os.cpu_count()} cores",
            measured_at=time.strftime("%Y-%m-%d", began),
            load=round(load, 1),
        )
        keep_curve(curve, Path(FILE), add=LONG == "only")


def lines(name: str, point: Point, first: Point) -> Iterator[Line]:
    """Return the lines of a step."""
    for what, unit in (("publish", "msg/s"), ("consume", "msg/s"), ("p99_ms", "ms p99")):
        value, baseline = getattr(point, what), getattr(first, what)
        yield Line(
            name=f"{name}, {what.removesuffix('_ms')}]",
            value=value,
            unit=unit,
            baseline=baseline,
            ratio=round(value / baseline, 3),
            target=None,
        )
