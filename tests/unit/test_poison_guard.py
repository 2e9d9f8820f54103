"""Messages that may have killed their consumers: few round trips for those beside others, one each for a suspect."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, key_queue_of
from mqlayer.consuming.ordered.poison_guard import RECORDED_AT_ONCE, ConsumerCrashed, PoisonMessageGuard
from mqlayer.domain.message import Record
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.groups.members import Assignment
from mqlayer.redis.partition_scripts import LockHolder, LockTaken
from tests.fixtures.wait import wait_until

COUNT = 20


def queue_of(*, suspects: frozenset[int] = frozenset(), died: frozenset[int] = frozenset()) -> KeyQueue:
    """Return a key queue in a worker's hand, of an owned partition whose former owners died."""
    owned = OwnedPartition(
        Assignment(PartitionId(1), NodeId(1), 0, 1024, 1, 1, release=False), LockHolder("p", 1, 1, "m", 1)
    )
    owned.open(LockTaken(1, 100, 1, b"", {}, 50, suspects, died))
    records = [Record(offset, b"1:1:%d:0" % offset, b"k", b"body") for offset in range(1, COUNT + 1)]
    key_queue = key_queue_of(owned, b"k", records[0])
    key_queue.batch = records
    return key_queue


def new_guard() -> PoisonMessageGuard:
    """Return a guard whose settler a test plays."""
    return PoisonMessageGuard(lambda _node: True)


def begin(caution: PoisonMessageGuard, key_queue: KeyQueue, at: int) -> list[int]:
    """Begin a message, play the settler, and return which starts were to be noted for it."""
    attempts = key_queue.owned.attempts
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(caution.begin, key_queue, key_queue.batch[at])
        wait_until(lambda: begun.done() or attempts.has_starts, what="a start, or none")
        _, noted = attempts.take()
        for start in noted:
            start.recorded.set()
        assert begun.result(10)
    caution.end(key_queue, key_queue.batch[at])
    return [start.offset for start in noted]


def test_what_follows_a_message_in_its_workers_hand_is_noted_with_it() -> None:
    caution, key_queue = new_guard(), queue_of()
    assert begin(caution, key_queue, 0) == list(range(1, RECORDED_AT_ONCE + 1))
    assert begin(caution, key_queue, 1) == []
    key_queue.owned.attempts.count(3, 1)
    assert begin(caution, key_queue, 2)[:2] == [3, RECORDED_AT_ONCE + 1]


def test_a_suspect_is_noted_by_itself() -> None:
    """What is noted with it could not be told from it if it kills its consumer again."""
    caution, key_queue = new_guard(), queue_of(suspects=frozenset({1, 4}))
    assert begin(caution, key_queue, 0) == [1]
    assert begin(caution, key_queue, 1) == [2, 3, *range(5, RECORDED_AT_ONCE + 3)]


def test_a_suspect_waits_until_the_one_before_is_settled() -> None:
    """Case 58: the server would take that for one that never ended, if this one kills its consumer."""
    caution, key_queue = new_guard(), queue_of(suspects=frozenset({1, 2}))
    assert begin(caution, key_queue, 0) == [1]
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(caution.begin, key_queue, key_queue.batch[1])
        with pytest.raises(TimeoutError):
            begun.result(0.05)
        assert not key_queue.owned.attempts.has_starts
        key_queue.owned.attempts.forget([], [1])
        wait_until(lambda: key_queue.owned.attempts.has_starts, what="the next one's start")
        [start] = key_queue.owned.attempts.take()[1]
        start.recorded.set()
        assert begun.result(10)


def test_a_message_that_was_started_alone_and_never_ended_has_failed() -> None:
    """Case 59."""
    caution, key_queue = new_guard(), queue_of(suspects=frozenset({1}), died=frozenset({1}))
    with pytest.raises(ConsumerCrashed):
        caution.begin(key_queue, key_queue.batch[0])
    assert begin(caution, key_queue, 0) == [1]
