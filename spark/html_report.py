"""One self-contained HTML page of results: no script, nothing to fetch.

All text is escaped: keys, reasons and member names come from users.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import Any, Final

WIDTH: Final = 960
HEIGHT: Final = 220
LEFT: Final = 64
BOTTOM: Final = 26
TOP: Final = 10
# A longer line shows the maximum of each group of neighbours.
POINTS: Final = 480
LONG: Final = 28
ROWS: Final = 200


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure; `state`: good, bad or empty."""

    label: str
    value: str
    state: str = ""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Figures side by side."""

    tiles: Sequence[Tile]

    def html(self) -> str:
        """Return HTML."""
        cells = (
            f'<div class="tile {escape(tile.state)}"><b>{escape(tile.value)}</b><span>{escape(tile.label)}</span></div>'
            for tile in self.tiles
        )
        return f'<div class="tiles">{"".join(cells)}</div>'


@dataclass(frozen=True, slots=True)
class Link:
    """A linking cell."""

    text: str
    url: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of equal fields."""

    title: str
    rows: Sequence[Mapping[str, Any]]
    nothing: str = "nothing"

    def html(self) -> str:
        """Return HTML."""
        head = f"<h3>{escape(self.title)}</h3>"
        if not self.rows:
            return f'{head}<p class="quiet">{escape(self.nothing)}</p>'
        names = "".join(
            f"<th{_kind(value)}>{escape(name.replace('_', ' '))}</th>" for name, value in self.rows[0].items()
        )
        body = "".join(f"<tr>{''.join(map(_cell, row.values()))}</tr>" for row in self.rows[:ROWS])
        left = len(self.rows) - ROWS
        more = f'<p class="quiet">{left:,} more are in the Parquet files</p>' if left > 0 else ""
        return (
            f'{head}<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>{more}'
        )


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar."""

    label: str
    value: float
    text: str


@dataclass(frozen=True, slots=True)
class BarChart:
    """Horizontal bars, and a line at `mean`."""

    title: str
    bars: Sequence[Bar]
    mean: float | None = None
    nothing: str = "nothing"

    def html(self) -> str:
        """Return HTML."""
        head = f"<h3>{escape(self.title)}</h3>"
        if not self.bars:
            return f'{head}<p class="quiet">{escape(self.nothing)}</p>'
        longest = max([*(bar.value for bar in self.bars), self.mean or 0]) or 1
        mean = "" if self.mean is None else f'<i style="left:{100 * self.mean / longest:.2f}%"></i>'
        rows = (
            f'<span class="name" title="{escape(bar.label)}">{escape(shortened(bar.label))}</span>'
            f'<span class="track"><u style="width:{100 * bar.value / longest:.2f}%"></u>{mean}</span>'
            f'<span class="said">{escape(bar.text)}</span>'
            for bar in self.bars
        )
        note = "" if self.mean is None else '<p class="quiet">The line is the mean.</p>'
        return f'{head}<div class="bars">{"".join(rows)}</div>{note}'


@dataclass(frozen=True, slots=True)
class LineChart:
    """Values over time, a line per series; points far beyond `every_s` (seconds) apart are not joined."""

    title: str
    series: Mapping[str, Sequence[tuple[datetime, float]]]
    unit: str
    every_s: float = 60.0
    tones: Sequence[int] = (0, 1, 2, 3)
    """Colours: 0 to 2 are shades of one, 3 is another."""

    def html(self) -> str:
        """Return HTML."""
        drawn = {name: _thinned(points) for name, points in self.series.items()}
        moments = [moment for points in drawn.values() for moment, _ in points]
        if not moments:
            return f'<h3>{escape(self.title)}</h3><p class="quiet">nothing</p>'
        scale = _Scale(min(moments), max(moments), [value for points in drawn.values() for _, value in points])
        thin = max(map(len, self.series.values())) > POINTS
        step_s = self.every_s * math.ceil(max(map(len, self.series.values())) / POINTS)
        paths = "".join(
            _line(tone, name, points, scale, step_s, self.unit)
            for tone, (name, points) in zip(self.tones, drawn.items(), strict=False)
        )
        named = zip(self.tones, self.series, strict=False)
        legend = "".join(f'<span class="s{tone}">{escape(name)}</span>' for tone, name in named)
        notes = [
            self.unit,
            *(["logarithmic"] if scale.logarithmic else []),
            *(["highest of neighbours"] if thin else []),
        ]
        legend = legend if len(self.series) > 1 else ""
        head = f'<h3>{escape(self.title)} <small>{escape(", ".join(notes))}</small></h3><p class="legend">{legend}</p>'
        return f"{head}{_svg(scale.axes() + paths, self.title)}"


@dataclass(frozen=True, slots=True)
class LpChart:
    """Load per LP, with partitions' bounds and splits."""

    title: str
    loads: Mapping[int, int]
    count: int
    bounds: Sequence[int]
    points: Sequence[int]

    def html(self) -> str:
        """Return HTML."""
        highest, mean = max(self.loads.values(), default=0) or 1, sum(self.loads.values()) / self.count
        top = _nice(highest)
        # Few hot LPs would hide all others.
        bent = highest > 20 * mean
        inner, high = WIDTH - LEFT - 8, HEIGHT - TOP - BOTTOM
        step = inner / self.count

        def x(lp: int) -> float:
            return LEFT + lp * step

        def part(load: float) -> float:
            return math.sqrt(load / top) if bent else load / top

        bars = "".join(
            f'<rect class="heat" x="{x(lp):.2f}" y="{TOP + high * (1 - part(load)):.2f}" width="{max(step, 0.9):.2f}" '
            f'height="{high * part(load):.2f}"><title>LP {lp}: {load:,} records</title></rect>'
            for lp, load in sorted(self.loads.items())
            if load
        )
        marks = "".join(_mark("bound", x(lp), high, f"partitions end and begin at LP {lp}") for lp in self.bounds)
        marks += "".join(_mark("cut", x(lp), high, f"split at LP {lp}") for lp in self.points)
        ticks = "".join(
            f'<text x="{x(lp):.1f}" y="{HEIGHT - 8}" text-anchor="{place}">{lp}</text>'
            for lp in range(0, self.count + 1, self.count // 8)
            for place in ("end" if lp == self.count else "middle",)
        )
        axis = f'<text x="{LEFT - 8}" y="{TOP + 10}" text-anchor="end">{_short(top)}</text>'
        axis += f'<line class="axis" x1="{LEFT}" x2="{WIDTH - 8}" y1="{TOP + high}" y2="{TOP + high}"/>'
        legend = '<p class="legend"><span class="lb">bounds of partitions</span><span class="lc">splits</span></p>'
        unit = "records per LP, heights as square roots" if bent else "records per LP"
        head = f"<h3>{escape(self.title)} <small>{unit}</small></h3>{legend}"
        return head + _svg(axis + bars + marks + ticks, self.title)


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence."""

    text: str
    state: str = ""

    def html(self) -> str:
        """Return HTML."""
        return f'<p class="note {escape(self.state)}">{escape(self.text)}</p>'


Part = Tiles | Table | BarChart | LineChart | LpChart | Note


@dataclass(frozen=True, slots=True)
class Section:
    """One job's part."""

    name: str
    title: str
    parts: Sequence[Part]

    def html(self) -> str:
        """Return HTML."""
        parts = "".join(part.html() for part in self.parts)
        return f'<section id="{escape(self.name)}"><h2>{escape(self.title)}</h2>{parts}</section>'


def page(title: str, lead: str, sections: Iterable[Section]) -> str:
    """Return the page."""
    found = list(sections)
    links = "".join(f'<a href="#{escape(one.name)}">{escape(one.title)}</a>' for one in found)
    body = "".join(one.html() for one in found)
    return PAGE.format(title=escape(title), lead=escape(lead), links=links, body=body, style=STYLE)


def shortened(text: str, limit: int = 40) -> str:
    """Return text without its middle beyond `limit`; unprintable characters are replaced."""
    seen = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return seen if len(seen) <= limit else f"{seen[: limit // 2]}…{seen[-(limit // 2 - 1) :]}"


class _Scale:
    def __init__(self, first: datetime, last: datetime, values: Sequence[float]) -> None:
        self.first, self.last = first, last
        positive = [value for value in values if value > 0]
        low, high = min(positive, default=1.0), max(positive, default=1.0)
        self.logarithmic = high / low > 200
        self.low = 10 ** math.floor(math.log10(low)) if self.logarithmic else 0.0
        self.high = 10 ** math.ceil(math.log10(high)) if self.logarithmic else _nice(high)

    def x(self, moment: datetime) -> float:
        whole = (self.last - self.first).total_seconds()
        part = (moment - self.first).total_seconds() / whole if whole else 0.5
        return LEFT + part * (WIDTH - LEFT - 12)

    def y(self, value: float) -> float:
        if self.logarithmic:
            part = math.log10(max(value, self.low) / self.low) / math.log10(self.high / self.low)
        else:
            part = value / self.high
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - part)

    def axes(self) -> str:
        lines = "".join(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 8}" y1="{self.y(value):.1f}" y2="{self.y(value):.1f}"/>'
            f'<text x="{LEFT - 8}" y="{self.y(value) + 4:.1f}" text-anchor="end">{_short(value)}</text>'
            for value in self._values()
        )
        form = "%H:%M" if (self.last - self.first).total_seconds() < 86_400 else "%m-%d %H:%M"
        moments = dict.fromkeys(self.first + (self.last - self.first) * part for part in (0, 0.25, 0.5, 0.75, 1))
        places = ["start", *["middle"] * (len(moments) - 2), "end"] if len(moments) > 1 else ["middle"]
        return lines + "".join(
            f'<text x="{self.x(moment):.1f}" y="{HEIGHT - 6}" text-anchor="{place}">{moment.strftime(form)}</text>'
            for moment, place in zip(moments, places, strict=True)
        )

    def _values(self) -> list[float]:
        if not self.logarithmic:
            return [self.high * part for part in (0, 0.25, 0.5, 0.75, 1)]
        powers = range(round(math.log10(self.low)), round(math.log10(self.high)) + 1)
        return [10.0**power for power in powers]


def _line(
    number: int, name: str, points: Sequence[tuple[datetime, float]], scale: _Scale, step_s: float, unit: str
) -> str:
    path, before = [], None
    for moment, value in points:
        joined = before is not None and (moment - before).total_seconds() <= step_s * 1.5
        path.append(f"{'L' if joined else 'M'}{scale.x(moment):.1f} {scale.y(value):.1f}")
        before = moment
    radius = 3 if len(points) < 60 else 1.5
    dots = "".join(
        f'<circle class="d{number}" cx="{scale.x(moment):.1f}" cy="{scale.y(value):.1f}" r="{radius}">'
        f"<title>{escape(name)} {moment:%Y-%m-%d %H:%M}: {value:,.4g} {escape(unit)}</title></circle>"
        for moment, value in points
    )
    return f'<path class="p{number}" d="{"".join(path)}"/>{dots}'


def _thinned(points: Sequence[tuple[datetime, float]]) -> Sequence[tuple[datetime, float]]:
    size = math.ceil(len(points) / POINTS)
    if size <= 1:
        return points
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[0][0], max(value for _, value in group)) for group in groups]


def _mark(kind: str, x: float, high: float, title: str) -> str:
    return f'<line class="{kind}" x1="{x:.2f}" x2="{x:.2f}" y1="{TOP}" y2="{TOP + high}"><title>{title}</title></line>'


def _svg(inner: str, title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{inner}</svg>'


def _cell(value: object) -> str:
    if isinstance(value, Link):
        return f'<td><a href="{escape(value.url)}">{escape(shortened(value.text))}</a></td>'
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"<td{_kind(value)}>{escape(_text(value))}</td>"
    return f'<td class="n">{value:,}</td>' if isinstance(value, int) else f'<td class="n">{value:,.2f}</td>'


def _kind(value: object) -> str:
    # Numbers align right, long texts may wrap.
    if isinstance(value, int | float) and not isinstance(value, bool):
        return ' class="n"'
    return ' class="long"' if isinstance(value, str) and len(value) > LONG else ""


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:%Y-%m-%d %H:%M:%S}" if isinstance(value, datetime) else shortened(str(value), 200)


def _nice(value: float) -> float:
    # A round number whose quarters are round too.
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * power >= value * 0.999999)


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:.3g}"


STYLE: Final = """
:root{color-scheme:light dark;--page:#f9f9f7;--card:#fcfcfb;--ink:#0b0b0b;--quiet:#66645f;--edge:#e1e0d9;
--grid:#e9e8e2;--fill:#2a78d6;--track:#efeee9;--s0:#86b6ef;--s1:#2a78d6;--s2:#104281;--s3:#eb6834;--good:#006300;
--goodbg:#e3f3e0;--bad:#b52626;--badbg:#fbe7e5;--cut:#eb6834}
@media(prefers-color-scheme:dark){:root{--page:#0d0d0d;--card:#1a1a19;--ink:#f4f4f2;--quiet:#a9a79f;--edge:#33332f;
--grid:#2a2a28;--fill:#3987e5;--track:#262624;--s0:#256abf;--s1:#6da7ec;--s2:#cde2fb;--s3:#f08a5d;--good:#7fd67f;
--goodbg:#12300f;--bad:#ff9d94;--badbg:#3d1512;--cut:#f08a5d}}*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}h1{font-size:26px;margin:0}
h2{font-size:20px;margin:0 0 12px}h3{font-size:15px;margin:26px 0 6px}h3 small{font-weight:400;color:var(--quiet)}
.lead,.quiet{color:var(--quiet);margin:4px 0}nav{margin:14px 0 22px;display:flex;flex-wrap:wrap;gap:16px}
a{color:var(--fill)}
section{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:20px 22px 22px;
margin:0 0 20px}.tiles{display:flex;flex-wrap:wrap;gap:10px}
.tile{border:1px solid var(--edge);border-radius:8px;padding:8px 14px;min-width:112px}
.tile b{display:block;font-size:21px;font-weight:600}.tile span{color:var(--quiet);font-size:13px}
.tile.good b,.note.good{color:var(--good)}.tile.bad b,.note.bad{color:var(--bad)}
.note.good,.note.bad{font-weight:600;padding:8px 12px;border-radius:8px;margin:0 0 14px}
.note.good{background:var(--goodbg)}.note.bad{background:var(--badbg)}.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:13.5px;min-width:50%}th{text-align:left;font-weight:600;color:var(--quiet)}
th,td{padding:4px 14px 4px 0;border-bottom:1px solid var(--grid);vertical-align:top;white-space:nowrap}
th.n,td.n{text-align:right;font-variant-numeric:tabular-nums}
td.long{white-space:pre-wrap;overflow-wrap:anywhere;min-width:180px}
.bars{display:grid;grid-template-columns:minmax(90px,max-content) 1fr max-content;gap:5px 12px;align-items:center;
font-size:13.5px}.name{white-space:pre;overflow:hidden;text-overflow:ellipsis;max-width:300px}
.track{position:relative;height:15px;background:var(--track);border-radius:3px}
.track u{position:absolute;inset:0 auto 0 0;background:var(--fill);border-radius:3px;min-width:1px}
.track i{position:absolute;top:-3px;bottom:-3px;width:2px;background:var(--cut)}
.said{color:var(--quiet);font-variant-numeric:tabular-nums}svg{width:100%;height:auto;display:block}
svg text{fill:var(--quiet);font-size:11.5px}path{fill:none;stroke-width:2;stroke-linejoin:round}
.grid{stroke:var(--grid)}.axis{stroke:var(--edge)}.heat{fill:var(--fill)}.bound{stroke:var(--quiet);stroke-width:1}
.cut{stroke:var(--cut);stroke-width:2;stroke-dasharray:5 3}.p0{stroke:var(--s0)}.p1{stroke:var(--s1)}
.p2{stroke:var(--s2)}.p3{stroke:var(--s3)}.d0{fill:var(--s0)}.d1{fill:var(--s1)}.d2{fill:var(--s2)}
.d3{fill:var(--s3)}.legend{margin:0 0 4px;font-size:13px;color:var(--quiet)}.legend span{margin-right:16px}
.legend span::before{content:"";display:inline-block;width:14px;height:3px;margin-right:6px;vertical-align:middle;
background:var(--fill)}.legend .s0::before{background:var(--s0)}.legend .s1::before{background:var(--s1)}
.legend .s2::before{background:var(--s2)}.legend .s3::before{background:var(--s3)}
.legend .lb::before{background:var(--quiet)}.legend .lc::before{background:var(--cut)}
"""

PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>{style}</style></head>
<body><main><h1>{title}</h1><p class="lead">{lead}</p><nav>{links}</nav>{body}</main></body></html>
"""
