"""Sets of offsets: ranges for the wire, and what an ack bitmap says."""

from __future__ import annotations

from collections.abc import Iterable


def as_ranges(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Return offsets as sorted, disjoint ranges [first, last] that do not touch."""
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


def is_settled(offset: int, base: int, bits: bytes) -> bool:
    """Say whether an ack bitmap, whose first bit is offset `base`, holds the offset as settled."""
    index = offset - base
    return 0 <= index < 8 * len(bits) and bool(bits[index >> 3] & (0x80 >> (index & 7)))


def first_unsettled(offset: int, base: int, bits: bytes) -> int:
    """Return the first offset from this one on that an ack bitmap does not hold as settled."""
    while is_settled(offset, base, bits):
        index = offset - base
        if index % 8 == 0 and bits[index >> 3] == 0xFF:
            whole = len(bits[index >> 3 :]) - len(bits[index >> 3 :].lstrip(b"\xff"))
            offset += 8 * whole
        else:
            offset += 1
    return offset
