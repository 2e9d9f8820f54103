"""The model of `bench.model`: what bounds a layout, and the page that shows its predictions."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from bench import __main__ as program
from bench.growth.points import read_curves
from bench.model import costs
from bench.model.__main__ import main
from bench.model.check import compare, layout_of, summary
from bench.model.ladder import RATES, fitted, ladder
from bench.model.predict import Layout, consumed, heartbeats, predict, published
from bench.registry import BENCHES

PAGE: Final = Path(__file__).parents[2] / "docs" / "explanation" / "scaling.md"
EXAMPLE: Final = re.compile(r"```bash\npython -m bench\.model (.*?)\n```\n\n```text\n(.*?)```", re.DOTALL)
WIDE: Final = Layout(nodes=100, partitions=1_000, members=1_000, producers=1_000, keys=1_000_000)
"""So much of everything that each test's short part is the first bottleneck."""


@pytest.mark.parametrize(
    ("short", "part"),
    [
        ({"producers": 1}, "producers"),
        ({"nodes": 1}, "nodes"),
        ({"members": 1}, "consumers"),
        ({"partitions": 1}, "consumers"),
        ({"handler_ms": 100.0, "members": 10}, "handlers"),
        ({"handler_ms": 100.0, "keys": 10}, "keys"),
        ({"outboxes": 1, "relays": 100, "postgres_cores": 1}, "outbox Postgres"),
        ({"outboxes": 10, "relays": 1, "postgres_cores": 100, "transaction": 100}, "relays"),
        ({"effects": "fence", "postgres_cores": 4}, "effects Postgres"),
        ({"cores": 2}, "machine"),
    ],
)
def test_the_part_of_which_there_is_least_is_the_first_bottleneck(short: dict[str, object], part: str) -> None:
    layout = replace(WIDE, **short)  # type: ignore[arg-type]
    found = predict(layout)
    assert found.bottleneck == part
    assert found.throughput == min(one.capacity for one in found.parts)
    assert found.throughput < predict(WIDE).throughput


def test_handlers_that_wait_do_what_their_number_allows() -> None:
    layout = Layout(handler_ms=2.0, members=4, concurrency=8)
    assert consumed(layout).capacity == pytest.approx(4 * 8 / 0.002 * costs.HANDLERS_BUSY)


def test_lag_rises_with_the_load_and_grows_for_ever_beyond_the_capacity() -> None:
    capacity = predict(WIDE).throughput
    calm, busy, over = (predict(replace(WIDE, rate=share * capacity)) for share in (0.1, 0.9, 1.5))
    assert calm.p50_ms < busy.p50_ms
    assert calm.p99_ms < busy.p99_ms
    assert calm.growth == busy.growth == 0
    assert over.growth == pytest.approx(capacity / 2)


def test_more_units_never_make_a_prediction_lower_except_partitions() -> None:
    layout = Layout(nodes=2, partitions=64, members=4, producers=2)
    for more in ({"nodes": 4}, {"members": 8}, {"producers": 4}):
        assert predict(replace(layout, **more)).throughput >= predict(layout).throughput  # type: ignore[arg-type]
    assert published(replace(layout, partitions=1_000)).capacity < published(layout).capacity


def test_each_group_costs_the_nodes_and_heartbeats_of_its_own() -> None:
    one, three = replace(WIDE, nodes=1), replace(WIDE, nodes=1, groups=3)
    assert predict(three).throughput < predict(one).throughput
    assert heartbeats(three) == pytest.approx(3 * heartbeats(one))


def test_larger_groups_beat_less_often() -> None:
    calm = replace(WIDE, members=costs.CALM_MEMBERS)
    assert heartbeats(replace(calm, members=costs.CALM_MEMBERS + 1)) < heartbeats(calm)


def test_a_layout_fitted_to_a_rate_takes_it() -> None:
    for rate in RATES:
        layout = fitted(Layout(rate=rate, groups=2, handler_ms=5.0, outboxes=1, transaction=10))
        found = predict(layout)
        assert found.growth == 0
        assert 0.3 < rate / found.throughput < 0.95
    assert len(list(ladder())) == len(RATES) + 1


def test_the_errors_are_those_of_all_measured_points_but_the_sources() -> None:
    """Loose: what is measured anew may differ by a third, a wrong formula by much more."""
    found = compare(read_curves())
    tested = {one.step for one in found if not one.source}
    assert len(tested) >= 20
    for figure, median, *_ in list(summary(found))[1:]:
        assert float(median.rstrip("%")) <= 50, figure


def test_a_measured_configuration_is_one_machine_with_all_groups_in_each_process() -> None:
    points = [point for curve in read_curves().values() for series in curve.series for point in series.points]
    for point in points:
        layout = layout_of(point.setup)
        assert (layout.members, layout.groups_per_process) == (point.setup.processes, point.setup.groups)
        assert layout.cores == 2


def test_the_pages_predictions_are_the_programs() -> None:
    """`python -m bench.growth` writes them again."""
    shown = EXAMPLE.findall(PAGE.read_text("utf-8"))
    assert len(shown) >= 4
    for arguments, text in shown:
        assert main(shlex.split(arguments)) + "\n" == text, arguments


def test_every_bench_that_the_costs_name_is_there() -> None:
    text = Path(costs.__file__).read_text("utf-8")
    named = {name for name in re.findall(r"`([a-z_]+)(?:\[[^`]*\])?`", text) if name != "appendfsync"}
    assert {"scale", "path_costs", "control_plane", "latency_outbox"} <= named
    program.load_benches()
    assert named <= set(BENCHES)
