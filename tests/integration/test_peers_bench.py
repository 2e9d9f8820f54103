"""The bench of peers, small: mqlayer and plain streams keep a key's order, and each figure is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers.catalogue import peer_named
from bench.peers.ground import Ground
from bench.peers.runner import measure

MESSAGES = 1_000


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mqlayer-direct", "mqlayer-outbox", "streams"])
def test_a_systems_figures_are_all_there_and_order_is_kept(name: str, tmp_path: Path) -> None:
    with Ground(cache=tmp_path) as ground:
        row = measure(peer_named(name), ground, MESSAGES)
    assert row.skipped == ""
    assert (row.messages, row.ordered, row.out_of_order) == (MESSAGES, MESSAGES // 10, 0)
    assert min(row.publish_per_s, row.consume_per_s, row.p50_ms, row.cpu_s_per_million) > 0
    assert row.p99_ms >= row.p50_ms
    assert "Redis" in row.versions
