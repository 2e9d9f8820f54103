"""Where to split the partitions of a topic so that their loads become even. Pure rules: no store, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from mqlayer.errors import InvalidInput


def balancing_points(
    loads: Mapping[int, int], ranges: Sequence[tuple[int, int]], partitions: int
) -> dict[tuple[int, int], list[int]]:
    """Return for each LP range the LPs to split it at, so that the heaviest of so many partitions is as light as can be.

    `loads`: messages per LP. Ranges are only split, never joined; what can't get lighter (a single LP, a range without
    load) is not split, so there may be fewer partitions than wanted. Raises InvalidInput for fewer than there are.
    """
    if partitions < len(ranges):
        raise InvalidInput(
            f"{len(ranges)} partitions are there, {partitions} are wanted: a split only adds; "
            "mqlayer route merge makes fewer"
        )
    limit = _lightest(loads, ranges, partitions)
    found = {r: _even(loads, r, len(_cuts(loads, r, limit)) + 1) for r in ranges}
    for _ in range(partitions - sum(len(points) + 1 for points in found.values())):
        heaviest = max(found, key=lambda r: _heaviest(loads, r, found[r]))
        points = _even(loads, heaviest, len(found[heaviest]) + 2)
        if _heaviest(loads, heaviest, points) >= _heaviest(loads, heaviest, found[heaviest]):
            break
        found[heaviest] = points
    return found


def piece_loads(loads: Mapping[int, int], lp_from: int, lp_to: int, points: Sequence[int]) -> list[int]:
    """Return the load of each part of a range that is split at these LPs."""
    return [sum(loads.get(lp, 0) for lp in range(lo, hi)) for lo, hi in pairwise((lp_from, *points, lp_to))]


def _heaviest(loads: Mapping[int, int], r: tuple[int, int], points: Sequence[int]) -> int:
    return max(piece_loads(loads, *r, points))


def _even(loads: Mapping[int, int], r: tuple[int, int], pieces: int) -> list[int]:
    """Return the points at which a range falls into so many pieces at the most, the heaviest as light as can be."""
    return _cuts(loads, r, _lightest(loads, [r], pieces))


def _lightest(loads: Mapping[int, int], ranges: Sequence[tuple[int, int]], pieces: int) -> int:
    """Return the least limit of load under which so many pieces are enough for all ranges."""
    low = max((loads.get(lp, 0) for lo, hi in ranges for lp in range(lo, hi)), default=0)
    high = max((piece_loads(loads, lo, hi, ())[0] for lo, hi in ranges), default=0)
    while low < high:
        middle = (low + high) // 2
        if sum(len(_cuts(loads, r, middle)) + 1 for r in ranges) <= pieces:
            high = middle
        else:
            low = middle + 1
    return low


def _cuts(loads: Mapping[int, int], r: tuple[int, int], limit: int) -> list[int]:
    """Return the fewest points at which a range falls into pieces of at most a limit, which no single LP is over."""
    points, load = [], 0
    for lp in range(*r):
        load += loads.get(lp, 0)
        if load > limit:
            points.append(lp)
            load = loads.get(lp, 0)
    return points
