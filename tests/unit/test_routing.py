"""Case 1 and the rules of routes."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqlayer.domain.routing import (
    LP_COUNT,
    LpRange,
    NodeId,
    PartitionId,
    Route,
    RouteVersion,
    check_tiling,
    even_ranges,
    lp_of,
    random_lp,
    spread,
)
from mqlayer.errors import InvalidInput
from tests.proof.golden_lps import GOLDEN_LPS
from tests.proof.route_ranges import range_of


@pytest.mark.parametrize(("key", "lp"), GOLDEN_LPS.items())
def test_a_key_has_the_same_lp_everywhere_and_for_ever(key: str, lp: int) -> None:
    assert lp_of(key.encode()) == lp


def test_the_lp_does_not_depend_on_the_process() -> None:
    program = "import sys; from mqlayer.domain.routing import lp_of; print(lp_of(sys.argv[1].encode()))"
    for key in ("a", "Ωμέγα"):
        done = subprocess.run([sys.executable, "-c", program, key], capture_output=True, text=True, check=True)
        assert int(done.stdout) == GOLDEN_LPS[key]


@given(st.text())
def test_every_key_has_an_lp(key: str) -> None:
    assert 0 <= lp_of(key.encode("utf-8", "surrogatepass")) < LP_COUNT


def test_messages_without_a_key_go_everywhere() -> None:
    rng = random.Random(1)
    assert len({random_lp(rng) for _ in range(20_000)}) == LP_COUNT


@given(st.integers(1, LP_COUNT))
def test_even_ranges_tile_and_differ_by_one_at_the_most(count: int) -> None:
    ranges = even_ranges(count)
    check_tiling(ranges)
    sizes = {lp_to - lp_from for lp_from, lp_to in ranges}
    assert len(ranges) == count
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("count", [0, -1, LP_COUNT + 1])
def test_a_topic_of_no_or_too_many_partitions_is_refused(count: int) -> None:
    with pytest.raises(InvalidInput):
        even_ranges(count)


@pytest.mark.parametrize(
    "ranges",
    [[], [(0, 1000)], [(1, 1024)], [(0, 500), (501, 1024)], [(0, 600), (500, 1024)], [(0, 0), (0, 1024)]],
)
def test_a_gap_an_overlap_and_an_empty_range_are_refused(ranges: list[tuple[int, int]]) -> None:
    """Case 2."""
    with pytest.raises(InvalidInput):
        check_tiling(ranges)


@given(st.integers(1, 40), st.integers(0, LP_COUNT - 1))
def test_a_route_finds_the_range_that_holds_the_lp(count: int, lp: int) -> None:
    ranges = tuple(LpRange(a, b, PartitionId(i + 1), NodeId(1)) for i, (a, b) in enumerate(even_ranges(count)))
    found = range_of(Route(1, "orders", RouteVersion(1), ranges, 1000, 0), lp)
    assert found.lp_from <= lp < found.lp_to


def test_partitions_are_spread_over_nodes_in_turn() -> None:
    assert spread(5, [NodeId(1), NodeId(2)]) == [1, 2, 1, 2, 1]
