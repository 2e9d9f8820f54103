"""Charts as shapes of SVG; templates/charts.html draws them, classes of console.css colour them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from math import floor, log10
from typing import Final, NamedTuple

from mqlayer.console.render import duration, number
from mqlayer.doctor.hot_partitions import is_hot
from mqlayer.inspect import Curve, CurvePoint
from mqlayer.routes import PlannedChange, RouteTimeline

WIDTH: Final = 520
HEIGHT: Final = 150
LEFT: Final = 58
RIGHT: Final = 8
TOP: Final = 8
BOTTOM: Final = 22
LPS: Final = 1024
BAND: Final = 26
"""Height of a route version."""
LABELS: Final = 150
"""Width of the labels beside them."""
LABELLED: Final = 34
"""A narrower partition has no label."""
SINGLE_SHAPES: Final = 400
"""Of more partitions, neighbours that look the same are one shape."""
LEVELS: Final = ("idle", "cool", "warm", "hot")
HEAT_PER_S: Final = 5.0
"""Lower rates vary too much within seconds, and no split is worth it."""
WARM: Final = 1.5
"""Times the fair share."""
UNKNOWN: Final = "unknown"
NO_SAMPLES: Final = "no sample was taken in this time; the job `sample` of `mqlayer workers` takes one each minute"


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A line by its path; `number` chooses colour and dashes."""

    label: str
    path: str
    number: int


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of an axis."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class TimeChart:
    """A chart over time; `description`: for those who don't see it. `missing`: labels without a line, `why`."""

    title: str
    description: str
    lines: Sequence[ChartLine]
    rows: Sequence[Tick] = ()
    times: Sequence[Tick] = ()
    missing: Sequence[str] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Shape:
    """A partition's rectangle."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class RouteChart:
    """A route: a band per version, the newest at the bottom."""

    description: str
    height: int
    bands: Sequence[Tick]
    shapes: Sequence[Shape]
    joined: bool = field(default=False)


def line_chart(
    title: str,
    curves: Mapping[str, Curve],
    *,
    now: datetime,
    last: timedelta,
    scale: float = 1.0,
    peaks: bool = False,
    shown: Callable[[float | None], str] = number,
    why: str = "",
) -> TimeChart:
    """Return a chart of curves by label, in one unit.

    `scale`: of the values; `peaks`: a second line of the highest; `why`: samples may have no value.
    """
    missing = [label for label, curve in curves.items() if all(one.mean is None for one in curve.points)]
    if not any(curve.points for curve in curves.values()):
        why = NO_SAMPLES
    series = {label: [(one, _scaled(one.mean, scale)) for one in curve.points] for label, curve in curves.items()}
    if peaks:
        series |= {
            f"{label}, highest": [(one, _scaled(one.highest, scale)) for one in curve.points]
            for label, curve in curves.items()
        }
    values = [value for points in series.values() for _, value in points if value is not None]
    if not values:
        return TimeChart(title, "no samples", (), missing=missing, why=why)
    top = nice(max(values))
    step_s = next(iter(curves.values())).step_s
    lines = [
        ChartLine(label, _path(points, now, last, top, step_s), at)
        for at, (label, points) in enumerate(series.items(), start=1)
        if any(value is not None for _, value in points)
    ]
    rows = [Tick(_y(part * top, top), shown(part * top)) for part in (0.0, 0.5, 1.0)]
    described = "; ".join(_described(label, points, shown) for label, points in series.items())
    return TimeChart(title, f"the last {_span(last)}: {described}", lines, rows, _times(now, last), missing, why)


def nice(value: float) -> float:
    """Return the next round number from a value up: 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next(step * power for step in (1, 2, 5, 10) if value <= step * power * 1.000001)


class Heat(NamedTuple):
    """A partition's heat: 0 idle, 1 cool, 2 warm, 3 hot; None: not known. `share`: of the topic's messages."""

    level: int | None
    share: float | None

    @property
    def word(self) -> str:
        """Its word."""
        return UNKNOWN if self.level is None else LEVELS[self.level]


def heats(rates: Mapping[int, tuple[float | None, int]]) -> dict[int, Heat]:
    """Return the heat of a topic's partitions in force, by rate and number of LPs.

    A fair share is that of the LPs, or an equal one if that is more. Below HEAT_PER_S a partition is cool.
    """
    total = sum(per_s or 0.0 for per_s, _ in rates.values())
    return {
        partition: _heat(per_s, per_s / total if per_s and total else 0.0, max(lps / LPS, 1 / len(rates)))
        for partition, (per_s, lps) in rates.items()
    }


def _heat(per_s: float | None, share: float, fair: float) -> Heat:
    if per_s is None:
        return Heat(None, None)
    if per_s < HEAT_PER_S:
        return Heat(int(per_s > 0), share)
    return Heat(3 if is_hot(share, fair) else 2 if share > WARM * fair else 1, share)


def route_chart(timeline: RouteTimeline, rates: Mapping[int, float | None], heat: Mapping[int, Heat]) -> RouteChart:
    """Return the picture of a route, with the heat of the partitions in force."""
    rows = range(timeline.since, timeline.upto + 1)
    made = {one.version: one for one in timeline.changes if one.state != "dropped"}
    bands = [Tick((version - timeline.since) * BAND, _band(version, made.get(version))) for version in rows]
    shapes: list[Shape] = []
    for one in timeline.spans:
        first, ended = max(one.first, timeline.since), timeline.upto + 1
        if one.ended is not None:
            ended = min(one.ended, ended)
        in_force = one.ended is None and timeline.upto == timeline.newest
        found = heat.get(one.partition, Heat(None, None))
        kind = f"heat{found.level or 0}" if in_force else "past"
        told = f", {number(rates.get(one.partition))} messages/s ({found.word})" if in_force else ""
        title = f"partition {one.partition} on {one.node}: LPs {one.lp_from} to {one.lp_to - 1}{told}"
        width = one.lp_to - one.lp_from
        label = f"p{one.partition}" if width >= LABELLED else ""
        top = (first - timeline.since) * BAND
        shapes.append(Shape(one.lp_from, top, width, (ended - first) * BAND - 3, kind, title, label))
    joined = len(shapes) > SINGLE_SHAPES
    described = f"LPs 0 to 1023 from left to right, route versions {timeline.since} to {timeline.upto} from the top"
    return RouteChart(described, len(rows) * BAND, bands, _joined(shapes) if joined else shapes, joined)


def _joined(shapes: Sequence[Shape]) -> list[Shape]:
    found: list[Shape] = []
    for one in sorted(shapes, key=lambda shape: (shape.y, shape.height, shape.x)):
        last = found[-1] if found else None
        same = last is not None and (last.y, last.height, last.kind) == (one.y, one.height, one.kind)
        if last is not None and same and last.x + last.width == one.x:
            title = f"{last.title.split(' and ')[0]} and more, to LP {one.x + one.width - 1:.0f}"
            found[-1] = Shape(last.x, last.y, last.width + one.width, last.height, last.kind, title)
        else:
            found.append(one)
    return found


def _band(version: int, change: PlannedChange | None) -> str:
    if change is None:
        return f"v{version}"
    return f"v{version} {change.kind} " + (f"{change.opened_at:%m-%d %H:%M}" if change.opened_at else change.state)


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _y(value: float, top: float) -> float:
    return round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top), 1)


def _x(at: datetime, now: datetime, last: timedelta) -> float:
    part = 1 - (now - at).total_seconds() / last.total_seconds()
    return round(LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, max(0.0, part)), 1)


def _path(
    points: Sequence[tuple[CurvePoint, float | None]], now: datetime, last: timedelta, top: float, step_s: float
) -> str:
    steps: list[str] = []
    before: datetime | None = None
    for point, value in points:
        if value is None:
            before = None
            continue
        at = point.at + timedelta(seconds=step_s)
        # A step without a sample leaves a gap; a point alone is a short dash.
        near = before is not None and (point.at - before).total_seconds() < 1.5 * step_s
        steps.append(f"{'L' if near else 'M'}{_x(at, now, last)},{_y(value, top)}" + ("" if near else "m-1.5,0h3"))
        before = point.at
    return "".join(steps)


def _times(now: datetime, last: timedelta) -> list[Tick]:
    form = "%H:%M" if last <= timedelta(days=1) else "%a %d"
    moments = [now - last * part for part in (1.0, 0.75, 0.5, 0.25, 0.0)]
    return [Tick(_x(at, now, last), f"{at.astimezone(UTC):{form}}") for at in moments]


def _described(
    label: str, points: Sequence[tuple[CurvePoint, float | None]], shown: Callable[[float | None], str]
) -> str:
    values = [value for _, value in points if value is not None]
    if not values:
        return f"{label}: no samples"
    return f"{label}: {shown(values[-1])} at the end, {shown(min(values))} to {shown(max(values))}"


def _span(last: timedelta) -> str:
    return duration(last.total_seconds())
