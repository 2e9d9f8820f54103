"""When offsets were given, and what an entry of outcomes says of them."""

from __future__ import annotations

from mqlayer.consuming.engine.delivery_times import GRAIN_S, DeliveryTimes
from mqlayer.redis.outcomes import OutcomeId, OutcomeRange, entries_of

LATER = 2 * GRAIN_S


def test_each_range_is_told_with_the_reads_that_gave_it() -> None:
    reads = DeliveryTimes()
    for number in range(4):
        reads.note(10 * number + 1, 10 * number + 10, number * LATER)
    assert reads.ages([(5, 12), (35, 35)], 5 * LATER) == [(10, 500), (20, 400), (40, 200)]
    assert reads.ages([(21, 30)], 5 * LATER) == [(30, 300)]
    assert reads.ages([], 5 * LATER) == []


def test_reads_in_quick_succession_count_as_one_with_the_time_of_the_first() -> None:
    """Not for ever: each new one begins when the time is over."""
    reads = DeliveryTimes()
    for number in range(100):
        reads.note(number + 1, number + 1, number * 0.3 * GRAIN_S)
    ages = reads.ages([(1, 100)], 100 * 0.3 * GRAIN_S)
    assert [last for last, _ in ages] == list(range(4, 101, 4))


def test_what_was_read_before_anybody_noted_is_of_no_known_time() -> None:
    """Before the topic was archived, or while it was not."""
    reads = DeliveryTimes()
    reads.note(11, 20, 1.0)
    assert reads.ages([(1, 15)], 2.0) == [(10, None), (20, 1_000)]
    reads.note(31, 40, 1.0 + GRAIN_S / 2)
    assert reads.ages([(20, 35)], 2.0) == [(20, 1_000), (30, None), (40, 975)]


def test_what_is_settled_is_forgotten_and_the_rest_is_not() -> None:
    reads = DeliveryTimes()
    for number in range(1_000):
        reads.note(number + 1, number + 1, number * LATER)
        reads.forget(number - 1)
    assert reads.ages([(999, 1_000)], 1_000 * LATER) == [(999, 200), (1_000, 100)]
    assert len(reads._lasts) <= 3
    reads.forget(10_000)
    assert reads.ages([(1_000, 1_000)], 1_000 * LATER) == [(1_000, 100)]


def test_an_entry_is_divided_where_its_offsets_differ() -> None:
    fields = {"m": "m-1", "t": "5000", "h": "1-9,20-20", "u": "10-12", "r": "4:,9:30,25:7", "a": "6:2,20:1", "x": "3"}
    flat = [part.encode() for pair in fields.items() for part in pair]
    (entry,) = entries_of([(b"7-3", flat)])
    assert entry[:3] == (OutcomeId(7, 3), "m-1", 5_000)
    assert entry.dropped == 3
    assert entry.ranges == [
        OutcomeRange(1, 4, "handled", 1, None),
        OutcomeRange(5, 5, "handled", 1, 30),
        OutcomeRange(6, 6, "handled", 3, 30),
        OutcomeRange(7, 9, "handled", 1, 30),
        OutcomeRange(20, 20, "handled", 2, 7),
        OutcomeRange(10, 12, "unmatched", 0, None),
    ]
