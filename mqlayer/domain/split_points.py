"""Choose split points for even loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from mqlayer.errors import InvalidInput


def balancing_points(
    loads: Mapping[int, int], ranges: Sequence[tuple[int, int]], partitions: int
) -> dict[tuple[int, int], list[int]]:
    """Return LPs to split each range at, so that the heaviest of `partitions` partitions is lightest.

    `loads`: messages per LP. Useless splits are omitted. Raises InvalidInput for fewer than exist.
    """
    if partitions < len(ranges):
        raise InvalidInput(
            f"{len(ranges)} partitions are there, {partitions} are wanted: a split only adds; "
            "mqlayer route merge makes fewer"
        )
    limit = _lightest(loads, ranges, partitions)
    parts = [part for r in ranges for part in _parts(r, _even(loads, r, len(_cuts(loads, r, limit)) + 1))]
    while len(parts) < partitions:
        # The heaviest is as light as possible; remaining parts split the next heaviest.
        parted = ((part, _even(loads, part, 2)) for part in sorted(parts, key=lambda p: -_load(loads, p)))
        heaviest = next(((part, points) for part, points in parted if points), None)
        if heaviest is None:
            break
        parts.remove(heaviest[0])
        parts += _parts(*heaviest)
    return {(lo, hi): sorted(start for start, _ in parts if lo < start < hi) for lo, hi in ranges}


def part_loads(loads: Mapping[int, int], lp_from: int, lp_to: int, points: Sequence[int]) -> list[int]:
    """Return a split range's loads."""
    return [_load(loads, part) for part in _parts((lp_from, lp_to), points)]


def _parts(r: tuple[int, int], points: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise((r[0], *points, r[1])))


def _load(loads: Mapping[int, int], r: tuple[int, int]) -> int:
    return sum(loads.get(lp, 0) for lp in range(*r))


def _even(loads: Mapping[int, int], r: tuple[int, int], parts: int) -> list[int]:
    return _cuts(loads, r, _lightest(loads, [r], parts))


def _lightest(loads: Mapping[int, int], ranges: Sequence[tuple[int, int]], parts: int) -> int:
    low = max((loads.get(lp, 0) for lo, hi in ranges for lp in range(lo, hi)), default=0)
    high = max((_load(loads, r) for r in ranges), default=0)
    while low < high:
        middle = (low + high) // 2
        if sum(len(_cuts(loads, r, middle)) + 1 for r in ranges) <= parts:
            high = middle
        else:
            low = middle + 1
    return low


def _cuts(loads: Mapping[int, int], r: tuple[int, int], limit: int) -> list[int]:
    points, load = [], 0
    for lp in range(*r):
        load += loads.get(lp, 0)
        if load > limit:
            points.append(lp)
            load = loads.get(lp, 0)
    return points
