"""The pictures of measured curves, and the plans of the bench that measures them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Final

import pytest

from bench.growth.__main__ import PICTURES
from bench.growth.curves import PLANS
from bench.growth.drawing import Scale, bounds, draw, short, ticks
from bench.growth.measure import quantile
from bench.growth.points import Curve, Point, Series, Setup, keep_curve, read_curves

ROOT: Final = Path(__file__).parents[2]


def point(nodes: int, publish: float, consume: float) -> Point:
    """Return a point of a curve over nodes."""
    return Point(
        setup=Setup(nodes=nodes),
        publish=publish,
        consume=consume,
        p50_ms=0.5,
        p99_ms=2.0,
        publish_cpu_us={},
        consume_cpu_us={},
        cores={},
    )


def curve(*points: Point, name: str = "nodes") -> Curve:
    """Return a curve of one series."""
    return Curve(
        name=name,
        axis="nodes",
        title="Nodes & more",
        series=[Series(name="all", points=list(points))],
        machine="2 cores",
        measured_at="2026-11-27",
        load=0.1,
    )


def test_every_curve_has_its_steps_in_growing_order_and_a_first_one() -> None:
    for plan in PLANS.values():
        series: dict[str, list[int]] = {}
        for name, setup in plan.setups():
            series.setdefault(name, []).append(getattr(setup, plan.axis))
        assert list(series) == list(plan.series)
        for steps in series.values():
            assert len(steps) >= 4
            assert steps == sorted(set(steps))


def test_every_field_that_the_bench_promises_to_let_grow_has_a_curve() -> None:
    grown = {plan.axis for plan in PLANS.values()}
    assert grown == {"processes", "nodes", "partitions", "groups", "keys", "body_bytes", "messages"}


def test_a_picture_is_well_formed_names_its_values_and_is_the_same_each_time() -> None:
    drawn = draw(curve(point(1, 100_000, 50_000), point(8, 400_000, 25_000)))
    assert drawn == draw(curve(point(1, 100_000, 50_000), point(8, 400_000, 25_000)))
    root = ET.fromstring(drawn)
    assert len(root.findall(".//{*}circle")) == 8
    assert "published: 100k, 400k; handled: 50k, 25k" in drawn
    assert "Nodes &amp; more" in drawn


def test_a_higher_value_stands_higher_and_every_value_is_inside() -> None:
    scale = Scale(10, 1_000, 200, 50)
    assert (scale.at(10), scale.at(100), scale.at(1_000)) == (200, 125, 50)
    for values in ([3.0, 4.0], [0.02, 700.0], [1_000.0, 1_000.0], [999_999.0]):
        low, high = bounds(values)
        assert low <= min(values)
        assert high >= max(values)
        assert high / low >= 4
        assert 2 <= len(ticks(low, high)) <= 8


def test_numbers_are_short() -> None:
    assert [short(value) for value in (0.123, 5, 1_000, 123_456, 10_000_000)] == ["0.123", "5", "1k", "123k", "10M"]


def test_a_curve_takes_the_place_of_the_one_of_its_name(tmp_path: Path) -> None:
    file = tmp_path / "curves.json"
    assert read_curves(file) == {}
    keep_curve(curve(point(1, 1, 1)), file)
    keep_curve(curve(point(1, 2, 2), name="keys"), file)
    keep_curve(curve(point(1, 3, 3)), file)
    assert {name: one.series[0].points[0].publish for name, one in read_curves(file).items()} == {"nodes": 3, "keys": 2}


def test_points_of_long_steps_are_added_to_those_of_the_usual_ones(tmp_path: Path) -> None:
    file = tmp_path / "curves.json"
    keep_curve(curve(point(1, 1, 1), point(2, 2, 2)), file, add=True)
    keep_curve(curve(point(2, 5, 5), point(8, 8, 8)), file, add=True)
    assert [one.publish for one in read_curves(file)["nodes"].series[0].points] == [1, 5, 8]


def test_long_steps_are_taken_on_demand() -> None:
    plan = PLANS["backlog"]
    assert plan.wanted("") == plan.steps
    assert plan.wanted("1") == (*plan.steps, *plan.long_steps)
    assert plan.wanted("only") == plan.long_steps == (10_000_000,)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 0.051), (0.99, 0.1), (1.0, 0.1)])
def test_a_quantile_is_a_latency_that_was_seen(share: float, expected: float) -> None:
    assert quantile(range(1, 101), share) == expected


def test_the_pictures_of_the_documents_are_those_of_the_kept_points() -> None:
    """`python -m bench.growth` draws them again."""
    kept = read_curves()
    assert kept
    assert {path.name for path in PICTURES.glob("scale-*.svg")} == {f"scale-{name}.svg" for name in kept}
    for name, one in kept.items():
        assert (PICTURES / f"scale-{name}.svg").read_text("utf-8") == draw(one), name


def test_every_kept_point_is_of_a_plan_that_there_is() -> None:
    for name, one in read_curves().items():
        assert one.axis == PLANS[name].axis
        for series in one.series:
            assert all(getattr(each.setup, one.axis) > 0 for each in series.points)


def test_every_picture_is_shown_with_its_words() -> None:
    text = (ROOT / "docs" / "explanation" / "scaling.md").read_text("utf-8")
    shown = set(re.findall(r"!\[[^\]]{20,}\]\(\.\./pictures/(scale-\w+\.svg)\)", text))
    assert shown == {path.name for path in PICTURES.glob("scale-*.svg")}
