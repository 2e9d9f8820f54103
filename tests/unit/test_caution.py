"""Messages that may have killed their consumers: few round trips for those beside others, one each for a suspect."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mqlayer.consuming.caution import NOTED_AT_ONCE, Caution, NoAnswer
from mqlayer.consuming.holdings import Held, Lane
from mqlayer.domain.message import Record
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.membership.members import Assigned
from mqlayer.redis.partitions import Holder, Taken
from tests.fixtures.waiting import wait_until

COUNT = 20


def lane_of(*, suspects: frozenset[int] = frozenset(), died: frozenset[int] = frozenset()) -> Lane:
    """Return a lane in a worker's hand, of a holding whose former owners died."""
    held = Held(Assigned(PartitionId(1), NodeId(1), 0, 1024, 1, 1, release=False), Holder("p", 1, 1, "m", 1))
    held.start_at(Taken(1, 100, 1, b"", {}, 50, suspects, died))
    records = [Record(offset, b"1:1:%d:0" % offset, b"k", b"body") for offset in range(1, COUNT + 1)]
    lane = Lane(held, b"k", records[0])
    lane.batch = records
    return lane


def begin(caution: Caution, lane: Lane, at: int) -> list[int]:
    """Begin a message, play the settler, and return which starts were to be noted for it."""
    held, woken = lane.held, threading.Event()
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(caution.begin, lane, lane.batch[at], woken)
        wait_until(lambda: begun.done() or held.starts, what="a start, or none")
        noted = [held.starts.popleft() for _ in range(len(held.starts))]
        for start in noted:
            start.noted.set()
        assert begun.result(10)
    caution.end(lane, lane.batch[at])
    return [start.offset for start in noted]


def test_what_follows_a_message_in_its_workers_hand_is_noted_with_it() -> None:
    caution, lane = Caution(), lane_of()
    assert begin(caution, lane, 0) == list(range(1, NOTED_AT_ONCE + 1))
    assert begin(caution, lane, 1) == []
    lane.held.noted.discard(3)
    assert begin(caution, lane, 2)[:2] == [3, NOTED_AT_ONCE + 1]


def test_a_suspect_is_noted_by_itself() -> None:
    """What is noted with it could not be told from it if it kills its consumer again."""
    caution, lane = Caution(), lane_of(suspects=frozenset({1, 4}))
    assert begin(caution, lane, 0) == [1]
    assert begin(caution, lane, 1) == [2, 3, *range(5, NOTED_AT_ONCE + 3)]


def test_a_suspect_waits_until_the_one_before_is_settled() -> None:
    """Case 58: the server would take that for one that never ended, if this one kills its consumer."""
    caution, lane = Caution(), lane_of(suspects=frozenset({1, 2}))
    assert begin(caution, lane, 0) == [1]
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(caution.begin, lane, lane.batch[1], threading.Event())
        with pytest.raises(TimeoutError):
            begun.result(0.05)
        assert not lane.held.starts
        lane.held.attempts.pop(1)
        wait_until(lambda: lane.held.starts, what="the next one's start")
        lane.held.starts.popleft().noted.set()
        assert begun.result(10)


def test_a_message_that_was_started_alone_and_never_ended_has_failed() -> None:
    """Case 59."""
    caution, lane = Caution(), lane_of(suspects=frozenset({1}), died=frozenset({1}))
    with pytest.raises(NoAnswer):
        caution.begin(lane, lane.batch[0], threading.Event())
    assert begin(caution, lane, 0) == [1]
