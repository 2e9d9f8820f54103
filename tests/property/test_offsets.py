"""Ranges of offsets and ack bitmaps against sets of integers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mqlayer.domain.offsets import as_ranges, first_unsettled, is_settled

OFFSETS = st.sets(st.integers(1, 200))


def bitmap(offsets: set[int], base: int) -> bytes:
    """Return the bitmap that a server keeps for these offsets."""
    bits = bytearray((max(offsets, default=base) - base) // 8 + 1)
    for offset in offsets:
        bits[(offset - base) // 8] |= 0x80 >> (offset - base) % 8
    return bytes(bits)


@given(st.lists(st.integers(1, 200)))
def test_ranges_hold_every_offset_once_and_do_not_touch(offsets: list[int]) -> None:
    ranges = as_ranges(offsets)
    assert [offset for first, last in ranges for offset in range(first, last + 1)] == sorted(set(offsets))
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(ranges))


@given(OFFSETS, st.integers(0, 210))
def test_a_bitmap_tells_which_offsets_are_settled(offsets: set[int], asked: int) -> None:
    assert is_settled(asked, 1, bitmap(offsets, 1)) == (asked in offsets)


@given(OFFSETS, st.integers(1, 210))
def test_the_first_unsettled_offset_is_the_next_one_that_is_not_in_the_bitmap(offsets: set[int], asked: int) -> None:
    expected = next(offset for offset in range(asked, 300) if offset not in offsets)
    assert first_unsettled(asked, 1, bitmap(offsets, 1)) == expected


def test_a_long_run_of_settled_offsets_is_passed_over_at_once() -> None:
    assert first_unsettled(3, 3, b"\xff" * 120_000 + b"\xfe") == 3 + 8 * 120_000 + 7


def test_an_empty_bitmap_holds_nothing_as_settled() -> None:
    assert first_unsettled(7, 7, b"") == 7
