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


def settled_above(committed: int, base: int, bits: bytes) -> set[int]:
    """Return the settled offsets above committed, from an ack bitmap whose first bit is offset `base`."""
    settled = set()
    for index, byte in enumerate(bits):
        if not byte:
            continue
        for bit in range(8):
            offset = base + 8 * index + bit
            if byte & (0x80 >> bit) and offset >= committed:
                settled.add(offset)
    return settled
