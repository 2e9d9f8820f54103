"""Draws a curve as SVG: messages per second at the left, latency at the right, all axes logarithmic.

The same points make the same bytes: numbers are rounded, and nothing depends on a font's measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from bench.growth.points import Curve, Point

WIDTH: Final = 700
TOP: Final = 58
HEIGHT: Final = 190
LEGEND: Final = 18
"""Height of a line of the legend."""
LEFT: Final = (62, 330)
RIGHT: Final = (412, 680)
COLOURS: Final = ("a", "b", "good", "bad")
STYLE: Final = """\
    .mq { --paper: #ffffff; --ink: #1c2733; --soft: #5b6b7b; --line: #9aa8b5; --a: #1f6feb; --b: #b35900; \
--bad: #c62828; --good: #2e7d32; font: 14px system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif }
    @media (prefers-color-scheme: dark) { .mq { --paper: #12181f; --ink: #e3e9ef; --soft: #9fb0c0; --line: #5c6d7e; \
--a: #3a78dd; --b: #b8691a; --bad: #ef6b6b; --good: #6cc070 } }
    .mq-paper { fill: var(--paper) }
    .mq text { fill: var(--ink) }
    .mq .mq-head { font-weight: 600 }
    .mq .mq-soft { fill: var(--soft); font-size: 12px }
    .mq .mq-mid { text-anchor: middle }
    .mq .mq-end { text-anchor: end }
    .mq-grid { stroke: var(--line); stroke-width: 1; opacity: .4 }
    .mq-curve { fill: none; stroke-width: 2 }
    .mq-curve-a { stroke: var(--a) } .mq-curve-b { stroke: var(--b) }
    .mq-curve-good { stroke: var(--good) } .mq-curve-bad { stroke: var(--bad) }
    .mq-dot-a { fill: var(--a) } .mq-dot-b { fill: var(--b) } .mq-dot-good { fill: var(--good) } .mq-dot-bad { \
fill: var(--bad) }"""

Value = Callable[[Point], float]


@dataclass(frozen=True, slots=True)
class Trace:
    """A line of a panel: its name, and a place and a value per point."""

    name: str
    dots: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Scale:
    """A logarithmic axis between two pixels."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 1)


def draw(curve: Curve) -> str:
    """Return the picture of a curve."""
    rates = [*traces(curve, "published", lambda point: point.publish), *traces(curve, "handled", consumed)]
    latencies = [*traces(curve, "p50", lambda point: point.p50_ms), *traces(curve, "p99", lambda point: point.p99_ms)]
    height = TOP + HEIGHT + 40 + LEGEND * max(len(rates), len(latencies))
    name = f"scale-{curve.name}"
    described = "; ".join(f"{one.name}: {', '.join(short(value) for _, value in one.dots)}" for one in rates)
    opening = (
        f'<svg class="mq" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc">'
    )
    lines = [
        opening,
        f'  <title id="{name}-title">{escape(curve.title)}</title>',
        f'  <desc id="{name}-desc">Messages per second by step. {escape(described)}.</desc>',
        f"  <style>\n{STYLE}\n  </style>",
        f'  <rect class="mq-paper" width="{WIDTH}" height="{height}" rx="8"/>',
        f'  <text class="mq-head" x="16" y="26">{escape(curve.title)}</text>',
        *panel("messages per second", rates, LEFT),
        *panel("milliseconds from publishing to the handler", latencies, RIGHT),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def consumed(point: Point) -> float:
    """Return a point's deliveries per second."""
    return point.consume


def traces(curve: Curve, what: str, value: Value) -> list[Trace]:
    """Return a line per series."""
    many = len(curve.series) > 1
    return [
        Trace(
            f"{what}, {series.name}" if many else what,
            [(getattr(point.setup, curve.axis), value(point)) for point in series.points],
        )
        for series in curve.series
    ]


def panel(title: str, shown: Sequence[Trace], between: tuple[int, int]) -> Iterator[str]:
    """Yield the elements of one panel."""
    dots = [dot for trace in shown for dot in trace.dots]
    places = sorted({place for place, _ in dots})
    low, high = bounds([value for _, value in dots])
    across = Scale(places[0], max(places[-1], places[0] * 2), between[0] + 8, between[1] - 8)
    up = Scale(low, high, TOP + HEIGHT, TOP)
    yield f'  <text class="mq-soft" x="{between[0]}" y="{TOP - 10}">{title}</text>'
    for value in ticks(low, high):
        y = up.at(value)
        yield f'  <path class="mq-grid" d="M{between[0]} {y} H{between[1]}"/>'
        yield f'  <text class="mq-soft mq-end" x="{between[0] - 6}" y="{y + 4:.1f}">{short(value)}</text>'
    for place in places:
        x = across.at(place)
        yield f'  <text class="mq-soft mq-mid" x="{x}" y="{TOP + HEIGHT + 18}">{short(place)}</text>'
    for number, trace in enumerate(shown):
        colour = COLOURS[number % len(COLOURS)]
        way = " L".join(f"{across.at(place)} {up.at(value)}" for place, value in trace.dots)
        yield f'  <path class="mq-curve mq-curve-{colour}" d="M{way}"/>'
        for place, value in trace.dots:
            yield f'  <circle class="mq-dot-{colour}" cx="{across.at(place)}" cy="{up.at(value)}" r="3"/>'
        y = TOP + HEIGHT + 40 + LEGEND * number
        yield f'  <rect class="mq-dot-{colour}" x="{between[0]}" y="{y - 8}" width="14" height="4"/>'
        yield f'  <text class="mq-soft" x="{between[0] + 20}" y="{y}">{escape(trace.name)}</text>'


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis: of 1, 2 and 5 times a power of ten, those around the values, apart by 4 at least."""
    low = max(one for one in steps(values) if one <= min(values))
    high = min(one for one in steps(values) if one >= max(values))
    while high / low < 4:
        high = min(one for one in steps([low, high]) if one > high)
    return low, high


def steps(values: Sequence[float]) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten around some values."""
    first, last = math.floor(math.log10(min(values))) - 1, math.ceil(math.log10(max(values))) + 1
    # Of text: powers of ten below one are inexact.
    return [float(f"{digit}e{power}") for power in range(first, last + 1) for digit in (1, 2, 5)]


def ticks(low: float, high: float) -> list[float]:
    """Return the values to write at an axis: six at most, else the powers of ten."""
    found = [one for one in steps([low, high]) if low <= one <= high]
    return found if len(found) <= 6 else [one for one in found if f"{one:e}".startswith("1")]


def short(value: float) -> str:
    """Write a number in few letters."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
