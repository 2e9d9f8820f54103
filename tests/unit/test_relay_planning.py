"""Rows become batches: only what continues its chain, in bounds, and nothing that can't be sent."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mqlayer.domain.message import NO_KEY, Record, void_facts
from mqlayer.domain.names import BATCH_BYTES_LIMIT, BATCH_COUNT_LIMIT, KEY_LIMIT
from mqlayer.redis.wire import message_packet
from mqlayer.relay.backoff import LONGEST_S, Interval, backoff_s
from mqlayer.relay.limits import RelayLimits
from mqlayer.relay.lp_cursors import LpCursor, LpCursors, Row, Target, chain_of, plan
from mqlayer.relay.outbox_reader import LateIds
from mqlayer.relay.targets import Targets


def row(lp: int, seq: int, *, number: int = 0, key: bytes | None = b"k", body: bytes | None = b"b") -> Row:
    return (number, chain_of(1, lp), seq, b"123", key, body)


@pytest.fixture
def targets() -> dict[int, Target]:
    """Two partitions, each with half of the LPs, both ready."""
    targets = {0: Target(1, 1, 0), 1: Target(2, 2, 0)}
    for target in targets.values():
        target.ready = True
    return targets


@pytest.fixture
def cursors(targets: dict[int, Target]) -> LpCursors:
    return LpCursors(lambda chain: targets[chain % 1024 // 512])


def cursor_of(cursors: LpCursors, lp: int) -> LpCursor:
    return cursors.get(chain_of(1, lp))


def test_consecutive_rows_of_an_lp_are_one_run_of_their_partitions_batch(cursors: LpCursors) -> None:
    batches, unsendable, _ = plan([row(5, 1), row(600, 1), row(5, 2), row(7, 1, key=None)], cursors)
    assert unsendable == []
    assert [(b.target.partition, b.count) for b in batches] == [(1, 3), (2, 1)]
    assert [(run.cursor.lp, run.first, len(run.messages)) for run in batches[0].runs] == [(5, 1, 2), (7, 1, 1)]
    assert batches[0].runs[1].messages == [message_packet(b"123", NO_KEY, b"b")]
    assert cursor_of(cursors, 5).sent == 2


def test_rows_that_were_sent_and_rows_of_other_relays_are_passed_by(cursors: LpCursors) -> None:
    plan([row(5, 1), row(5, 2)], cursors)
    batches, *_ = plan([row(5, 1), row(5, 2), (9, None, 1, b"1", b"k", None)], cursors)
    assert batches == []
    assert cursors.behind == {}


def test_a_row_behind_a_hole_has_its_lp_read_by_seq(cursors: LpCursors) -> None:
    batches, *_ = plan([row(5, 1), row(5, 3), row(5, 4), row(6, 1)], cursors)
    assert sum(batch.count for batch in batches) == 2
    cursor = cursor_of(cursors, 5)
    assert list(cursors.behind.values()) == [cursor]
    assert plan([row(5, 2)], cursors)[0] == [], "while it is behind, the scan's rows are not its next ones"
    cursor.expected = cursor.sent + 1
    assert sum(batch.count for batch in plan([row(5, 2), row(5, 3)], cursors)[0]) == 2
    cursors.follow(cursor)
    assert sum(batch.count for batch in plan([row(5, 4)], cursors)[0]) == 1


def test_batches_are_bounded_by_count_and_bytes(cursors: LpCursors) -> None:
    rows = [row(5, seq) for seq in range(1, 2 * BATCH_COUNT_LIMIT + 2)]
    assert [batch.count for batch in plan(rows, cursors)[0]] == [BATCH_COUNT_LIMIT, BATCH_COUNT_LIMIT, 1]
    body = bytes(BATCH_BYTES_LIMIT // 2)
    batches, *_ = plan([row(6, seq, body=body) for seq in range(1, 5)], cursors)
    assert [batch.count for batch in batches] == [1, 1, 1, 1]
    assert [batch.runs[0].first for batch in batches] == [1, 2, 3, 4]


def test_a_target_that_is_not_ready_has_its_lps_wait_and_no_others(
    cursors: LpCursors, targets: dict[int, Target]
) -> None:
    targets[0].ready = False
    batches, unsendable, _ = plan([row(5, 1), row(600, 1), row(5, 2)], cursors)
    assert [batch.target.partition for batch in batches] == [2]
    assert unsendable == []
    assert [cursor.lp for cursor in cursors.behind.values()] == [5]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (row(5, 2, key=b"x" * (KEY_LIMIT + 1)), "key of 513 bytes"),
        (row(5, 2, key="ä".encode() * 300), "key of 600 bytes"),
        (row(5, 2, body=None), "hard limit"),
    ],
)
def test_a_row_that_can_never_be_sent_holds_its_lp(cursors: LpCursors, bad: Row, reason: str) -> None:
    batches, unsendable, _ = plan([row(5, 1), bad, row(5, 3), row(6, 1)], cursors)
    assert sum(batch.count for batch in batches) == 2
    ((cursor, seq, told),) = unsendable
    assert (cursor.lp, seq) == (5, 2)
    assert reason in told
    cursors.fall_behind(cursor)
    assert (list(cursors.blocked.values()), cursors.behind) == ([cursor], {})
    cursors.release(cursor)
    assert (cursors.blocked, list(cursors.behind.values())) == ({}, [cursor])


def test_in_a_best_effort_topic_a_void_record_takes_its_place(cursors: LpCursors, targets: dict[int, Target]) -> None:
    targets[0].passes_over = True
    rows = [row(5, 1), row(5, 2, key=b"x" * (KEY_LIMIT + 1)), row(5, 3), row(6, 1, body=None)]
    (batch,), unsendable, voided = plan(rows, cursors)
    assert (unsendable, cursors.blocked, cursors.behind) == ([], {}, {})
    assert [(each.cursor.lp, each.seq) for each in voided] == [(5, 2), (6, 1)]
    of_five, of_six = batch.runs
    facts = b'123:{"mq-void":"key of 513 bytes, the limit is 512"}'
    assert of_five.messages == [
        message_packet(b"123", b"k", b"b"),
        message_packet(facts, NO_KEY, b""),
        message_packet(b"123", b"k", b"b"),
    ]
    assert len(of_six.messages) == 1


def test_a_void_record_waits_for_its_target_as_any(cursors: LpCursors, targets: dict[int, Target]) -> None:
    targets[0].passes_over, targets[0].ready = True, False
    assert plan([row(5, 1, body=None)], cursors) == ([], [], [])
    assert [cursor.lp for cursor in cursors.behind.values()] == [5]


def test_a_topic_that_nobody_knows_holds_its_lps_whatever_it_was(
    cursors: LpCursors, targets: dict[int, Target]
) -> None:
    targets[0].passes_over, targets[0].ready, targets[0].refusal = False, False, "unknown topic"
    assert [each.reason for each in plan([row(5, 1, body=None)], cursors).unsendable] == ["unknown topic"]


@pytest.mark.parametrize("facts", [b"17", b'17:{"h":"v"}', b'17:{"mq-tags":"0011:eu","h":"a:b"}'])
def test_a_void_record_says_so_and_nothing_else_does(facts: bytes) -> None:
    void = Record(1, b"1:2:3:" + void_facts(facts, 'a "reason"'), NO_KEY, b"")
    assert (void.void, void.at_ms, void.headers, void.tags) == (True, 17, {}, ())
    assert not Record(1, b"1:2:3:" + facts, b"k", b"b").void
    assert not Record(1, b'1:2:3:17:{"h":"\\"mq-void\\":"}', b"k", b"b").void


def test_a_long_key_within_the_limit_is_sent(cursors: LpCursors) -> None:
    assert plan([row(5, 1, key=b"x" * KEY_LIMIT)], cursors)[0][0].count == 1


def test_a_refused_target_says_why_for_each_lp(cursors: LpCursors, targets: dict[int, Target]) -> None:
    targets[0].ready, targets[0].refusal = False, "unknown topic"
    unsendable = plan([row(5, 1), row(5, 2), row(6, 1)], cursors).unsendable
    assert [(each.cursor.lp, each.reason) for each in unsendable] == [(5, "unknown topic"), (6, "unknown topic")]


def test_a_rewound_queue_starts_again_behind_the_mark(cursors: LpCursors) -> None:
    plan([row(5, seq) for seq in range(1, 10)], cursors)
    cursor = cursor_of(cursors, 5)
    cursor.advance(9)
    cursors.rewind(cursor, 4, write=7)
    assert (cursor.sent, cursor.acked, cursor.rewound_at, cursor.state) == (4, 4, 7, "behind")
    cursors.follow(cursor)
    cursor.advance(6)
    assert (cursor.sent, cursor.expected) == (6, 7), "a rival relay may be ahead of us"


def test_queues_of_given_up_lp_sets_are_forgotten(cursors: LpCursors) -> None:
    plan([row(5, 1), row(5, 3), row(70, 1), row(600, 1)], cursors)
    cursors.forget([0, 9])
    assert sorted(cursor.lp for cursor in cursors) == [70]
    assert cursors.behind == {}


def test_what_is_known_of_a_deleted_topic_is_forgotten(cursors: LpCursors) -> None:
    """An outbox has it no more; of a topic that it never had, rows are held and stay so."""
    names = iter([{1: "orders", 2: "mails"}, {2: "mails"}, {2: "mails"}])
    unused: Any = None
    targets = Targets(unused, unused, lambda: next(names))
    assert [targets.forget_deleted() for _ in range(3)] == [set(), {1}, set()]
    kept = cursors.get(chain_of(2, 5))
    for cursor in (cursors.get(chain_of(1, 5)), cursors.get(chain_of(1, 6))):
        cursors.fall_behind(cursor)
    cursors.forget_topics({1})
    assert (list(cursors), cursors.behind) == ([kept], {})


def test_batches_keep_no_message_alive_after_planning(cursors: LpCursors) -> None:
    batches, *_ = plan([row(5, 1)], cursors)
    assert cursor_of(cursors, 5).messages is not batches[0].runs[0].messages
    assert batches[0].target.batch is None


def rows_of(*numbers: int) -> list[Row]:
    return [row(5, number, number=number) for number in numbers]


def test_ids_that_were_not_visible_are_asked_for_at_growing_intervals_until_they_are_too_old() -> None:
    late = LateIds(RelayLimits(late_s=2.0))
    late.note(10, rows_of(12, 15), now=0.0)
    asked = [now for now in (step / 100 for step in range(300)) if late.due(now) == [11, 13, 14]]
    assert asked[0] == 0.0
    assert 5 <= len(asked) <= 20
    assert asked[-1] <= 2.0
    assert len(late) == 0


def test_ids_that_came_are_not_asked_for_again() -> None:
    late = LateIds(RelayLimits())
    late.note(10, rows_of(12, 14), now=0.0)
    late.found(rows_of(11))
    assert late.due(0.0) == [13]


def test_chunks_without_holes_note_nothing_and_large_holes_are_bounded() -> None:
    late = LateIds(RelayLimits(late_ids=100))
    late.note(10, rows_of(11, 12, 13), now=0.0)
    assert len(late) == 0
    late.note(13, rows_of(1_000_000), now=0.0)
    assert late.due(0.0) == list(range(999_900, 1_000_000))


def test_pauses_grow_to_a_bound_and_are_never_in_step() -> None:
    rng = random.Random(1)
    waits = [backoff_s(failures, rng) for failures in range(1, 40)]
    assert waits[0] <= 0.05
    assert all(LONGEST_S / 2 <= wait <= LONGEST_S for wait in waits[10:])
    assert len(set(waits)) == len(waits)


def test_an_interval_is_due_at_first_and_then_when_it_has_passed() -> None:
    every = Interval(1.0)
    assert [every.due(now) for now in (5.0, 5.5, 6.0, 6.9)] == [True, False, True, False]
    every.hasten()
    assert every.due(6.9)
