"""The bench of growth, small: each figure of a point is there."""

from __future__ import annotations

import pytest

from bench.growth import measure as module
from bench.growth.measure import measure
from bench.growth.points import Setup
from bench.stage import Stage


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("late_group", [False, True])
def test_a_configuration_is_measured_in_all_its_parts(late_group: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LATENCY_S", 0.5)
    setup = Setup(processes=2, nodes=2, partitions=4, groups=2, messages=2_000, rate=100.0, late_group=late_group)
    with Stage() as stage:
        point = measure(stage, setup)
    assert point.publish > 0
    assert point.consume > 0
    assert 0 < point.p50_ms <= point.p99_ms
    assert point.publish_cpu_us["producer"] > 0
    assert point.consume_cpu_us["consumers"] > 0
    assert point.cores["nodes"] > 0


@pytest.mark.full
@pytest.mark.slow
def test_processes_that_start_behind_a_backlog_count_from_their_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LATE", 1_000)
    monkeypatch.setattr(module, "LATENCY_S", 0.5)
    with Stage() as stage:
        point = measure(stage, Setup(partitions=4, messages=20_000, rate=100.0, late_group=True))
    assert point.consume > 0
    assert point.p99_ms > 0
