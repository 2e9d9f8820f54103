"""Offset ranges and ack bitmaps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

OffsetRange = tuple[int, int]
"""First and last offset."""


def as_ranges(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Return offsets as sorted, disjoint, maximal ranges."""
    distinct = sorted(set(offsets))
    if distinct and distinct[-1] - distinct[0] + 1 == len(distinct):
        return [(distinct[0], distinct[-1])]
    ranges: list[tuple[int, int]] = []
    first = last = None
    for offset in distinct:
        if last is not None and offset == last + 1:
            last = offset
            continue
        if first is not None and last is not None:
            ranges.append((first, last))
        first = last = offset
    if first is not None and last is not None:
        ranges.append((first, last))
    return ranges


def joined(ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
    """Return sorted, disjoint, maximal ranges."""
    found: list[OffsetRange] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def covers(ranges: Sequence[OffsetRange], offset: int) -> bool:
    """Whether sorted, disjoint ranges contain an offset."""
    at = bisect_right(ranges, (offset, 1 << 63)) - 1
    return at >= 0 and ranges[at][0] <= offset <= ranges[at][1]


def is_settled(offset: int, base: int, bits: bytes) -> bool:
    """Whether an ack bitmap, which starts at `base`, has the offset settled."""
    index = offset - base
    return 0 <= index < 8 * len(bits) and bool(bits[index >> 3] & (0x80 >> (index & 7)))


def first_unsettled(offset: int, base: int, bits: bytes) -> int:
    """Return the first unsettled offset from `offset` on."""
    while is_settled(offset, base, bits):
        index = offset - base
        if index % 8 == 0 and bits[index >> 3] == 0xFF:
            whole = len(bits[index >> 3 :]) - len(bits[index >> 3 :].lstrip(b"\xff"))
            offset += 8 * whole
        else:
            offset += 1
    return offset
