"""Split points that balance a topic: against all possible splits, for small ranges."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqlayer.domain.routing import even_ranges
from mqlayer.domain.split_points import balancing_points, part_loads
from mqlayer.errors import InvalidInput

LOADS = st.lists(st.integers(0, 20), min_size=2, max_size=8)


def heaviest(loads: dict[int, int], points: dict[tuple[int, int], list[int]]) -> int:
    return max(load for r, cuts in points.items() for load in part_loads(loads, *r, cuts))


@given(LOADS, st.integers(1, 7), st.data())
def test_no_other_splits_make_the_heaviest_partition_lighter(taken: list[int], extra: int, data: st.DataObject) -> None:
    loads, size = dict(enumerate(taken)), len(taken)
    middle = data.draw(st.integers(1, size - 1))
    ranges = [(0, middle), (middle, size)]
    found = balancing_points(loads, ranges, len(ranges) + extra)
    assert list(found) == ranges
    assert sum(map(len, found.values())) <= extra
    for (lo, hi), points in found.items():
        assert points == sorted(set(points))
        assert all(lo < point < hi for point in points)
    inner = [lp for lp in range(1, size) if lp != middle]
    choices = [cut for count in range(extra + 1) for cut in combinations(inner, count)]
    best = min(max(part_loads(loads, 0, size, sorted((*cut, middle)))) for cut in choices)
    assert heaviest(loads, found) == best


def test_a_skewed_topic_is_balanced() -> None:
    """Half of the load is in 16 LPs of the first of two partitions."""
    loads = dict.fromkeys(range(1024), 1) | dict.fromkeys(range(100, 116), 64)
    before = max(part_loads(loads, 0, 1024, [512]))
    found = balancing_points(loads, even_ranges(2), 8)
    assert before == 512 + 16 * 63
    assert heaviest(loads, found) <= sum(loads.values()) / 8 + 64
    assert len(found[0, 512]) > len(found[512, 1024])


def test_one_hot_lp_is_as_light_as_it_gets() -> None:
    """The rest of the wish goes to those that can be parted, and no further."""
    loads = {700: 1_000, 3: 1, 5: 1, 6: 2}
    assert balancing_points(loads, even_ranges(2), 3) == {(0, 512): [6], (512, 1024): []}
    assert balancing_points(loads, even_ranges(2), 9) == {(0, 512): [5, 6], (512, 1024): []}


def test_a_topic_without_load_is_not_split() -> None:
    assert balancing_points({}, even_ranges(3), 9) == {r: [] for r in even_ranges(3)}


def test_fewer_partitions_than_there_are_are_refused() -> None:
    with pytest.raises(InvalidInput, match="4 partitions are there, 2 are wanted"):
        balancing_points({1: 1}, even_ranges(4), 2)
