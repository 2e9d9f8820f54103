"""Pages of the Spark jobs: self-contained, escaped, drawn from plain data."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree as ET

import pytest

from mqlayer.spark.html_report import (
    Bar,
    BarChart,
    LineChart,
    LpChart,
    Note,
    Part,
    Section,
    Table,
    Tile,
    Tiles,
    page,
    shortened,
)

EVIL = "<img src=x onerror='alert(1)'>\"&"
AT = datetime(2026, 11, 22, 10, 0, tzinfo=UTC)


def minutes(*values: float) -> list[tuple[datetime, float]]:
    return [(AT + timedelta(minutes=number), value) for number, value in enumerate(values)]


def drawing(part: Part) -> ET.Element:
    """Return the SVG of a part, which must be well-formed."""
    (text,) = re.findall(r"<svg.*?</svg>", part.html(), re.DOTALL)
    return ET.fromstring(text)


PARTS: list[Part] = [
    Tiles([Tile(EVIL, EVIL, "bad")]),
    Table(EVIL, [{EVIL: EVIL, "n": 1_234, "part": 0.5, "none": None, "at": AT}]),
    Table(EVIL, [], EVIL),
    BarChart(EVIL, [Bar(EVIL, 3, EVIL), Bar("b", 0, "0")], 1.5),
    BarChart(EVIL, [], nothing=EVIL),
    LineChart(EVIL, {EVIL: minutes(1, 2, 3), "other": minutes(0)}, EVIL),
    LineChart(EVIL, {"none": []}, "ms"),
    LpChart(EVIL, {3: 10, 1023: 1}, 1024, [512], [4]),
    LpChart(EVIL, {}, 1024, [], []),
    Note(EVIL, "good"),
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_what_users_wrote_is_text_and_nothing_else(part: Part) -> None:
    text = page(EVIL, EVIL, [Section("one", EVIL, [part])])
    assert "<img" not in text
    assert "&lt;img" in text
    assert "<script" not in text
    assert not re.search(r"https?:|url\(|@import|src=[^x]", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme:dark" in text


@pytest.mark.parametrize(
    "part", [part for part in PARTS if "<svg" in part.html()], ids=lambda part: type(part).__name__
)
def test_drawings_are_well_formed(part: Part) -> None:
    assert drawing(part).attrib["role"] == "img"


def test_lines_are_broken_where_minutes_are_missing() -> None:
    points = [*minutes(1, 2), (AT + timedelta(minutes=30), 3.0)]
    (line,) = [path.attrib["d"] for path in drawing(LineChart("x", {"p50": points}, "ms")).iter("path")]
    assert (line.count("M"), line.count("L")) == (2, 1)


def test_values_that_span_much_are_on_a_logarithmic_scale() -> None:
    assert "logarithmic" in LineChart("x", {"p50": minutes(1, 1_000)}, "ms").html()
    assert "logarithmic" not in LineChart("x", {"p50": minutes(10, 1_000)}, "ms").html()


def test_a_long_line_keeps_its_highest_points() -> None:
    values = [1.0] * 5_000
    values[1_234] = 77.0
    chart = LineChart("x", {"p50": minutes(*values)}, "ms")
    dots = list(drawing(chart).iter("circle"))
    assert len(dots) <= 480
    assert sum("77" in (dot[0].text or "") for dot in dots) == 1
    assert "highest of neighbours" in chart.html()


def test_a_strip_marks_bounds_and_splits() -> None:
    found = drawing(LpChart("x", {0: 5, 100: 10}, 1024, [512], [100, 700]))
    kinds = [element.attrib.get("class") for element in found]
    assert (kinds.count("heat"), kinds.count("bound"), kinds.count("cut")) == (2, 1, 2)


def test_long_tables_say_how_much_is_left_out() -> None:
    text = Table("x", [{"n": number} for number in range(203)]).html()
    assert text.count("<tr>") == 201
    assert "3 more are in the Parquet files" in text


def test_long_and_unprintable_names_are_shortened_and_shown() -> None:
    assert shortened("a" * 100) == "a" * 20 + "…" + "a" * 19
    assert shortened("a\x00b\n") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"
