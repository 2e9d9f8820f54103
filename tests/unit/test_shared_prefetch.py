"""What a member of a shared group has in hand: who may begin it, and what takes room."""

from __future__ import annotations

import pytest

from mqlayer.consuming.shared import prefetch as pools
from mqlayer.consuming.shared import ready_slices
from mqlayer.consuming.shared.fetched_batch import FetchedBatch
from mqlayer.consuming.shared.prefetch import Prefetch
from mqlayer.consuming.shared.ready_slices import WorkSlice
from mqlayer.domain.message import Record
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.groups.pop_partitions import PopPartition
from mqlayer.redis.shared_scripts import SharedGroupPartition


class Clock:
    """Stands until it is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (pools, ready_slices):
        monkeypatch.setattr(module, "clock", clock)
    return clock


@pytest.fixture
def pool(clock: Clock) -> Prefetch:
    return Prefetch(concurrency=2, prefetch_count=10, prefetch_bytes=1000, visibility_timeout_s=10.0)


def put(
    pool: Prefetch, clock: Clock, *offsets: int, node: int = 1, suspect: bool = False, attempts: int = 0
) -> FetchedBatch:
    """Have records in hand, to be handled."""
    one = PopPartition(PartitionId(node), NodeId(node), 5, 1, 0, 0, cut=False, readable=True)
    records = [Record(offset, b"1:0:%d:0" % offset, b"k", b"body") for offset in offsets]
    batch = FetchedBatch(one, SharedGroupPartition("p", node, 7, 5), 5, records, clock())
    batch.suspect = suspect
    batch.attempts = dict.fromkeys(offsets, attempts) if attempts else {}
    pool.add(batch)
    pool.put(batch)
    return batch


def test_a_suspect_that_its_worker_has_not_begun_for_long_is_not_given_to_another(pool: Prefetch, clock: Clock) -> None:
    """Case 59: who runs alone is counted in and out once, or no suspect would be begun ever again."""
    first, second = (put(pool, clock, offset, suspect=True, attempts=1) for offset in (1, 2))
    taken = pool.next_slice(0.0)
    assert taken is not None
    assert taken[0] is first
    worker_slot = pool.new_worker_slot()
    worker_slot.begin(taken, clock())
    clock.now += 1.0
    assert pool.reclaim_slow() == []
    assert pool.next_slice(0.0) is None, "it runs alone"
    pool.return_slice(WorkSlice(first, first.records), ())
    assert pool.next_slice(0.0) == WorkSlice(second, second.records)


def test_what_is_stuck_of_a_node_that_is_away_takes_no_room(pool: Prefetch, clock: Clock) -> None:
    """A bound of what can't grow while its node is away; it counts again with its node."""
    put(pool, clock, *range(1, 9), node=2)
    put(pool, clock, 1, 2, node=1)
    assert pool.capacity() == 0
    pool.note_node(NodeId(2), unreachable=True)
    assert pool.capacity() == 8
    pool.note_node(NodeId(2), unreachable=False)
    assert pool.capacity() == 0


def test_what_nobody_began_is_taken_out_once_and_begun_by_nobody(pool: Prefetch, clock: Clock) -> None:
    """Case 71."""
    batch, suspect = put(pool, clock, 1, 2, 3), put(pool, clock, 4, suspect=True)
    elsewhere = put(pool, clock, 5, node=2)
    batch.lost.add(2)
    found = pool.take_unstarted(lambda one: one.assignment.node == 1)
    assert found == [(batch, [1, 3]), (suspect, [4])]
    assert pool.take_unstarted(lambda one: one.assignment.node == 1) == []
    assert pool.next_slice(0.0) == WorkSlice(elsewhere, elsewhere.records)


def test_a_message_is_ours_while_its_node_said_so_lately(pool: Prefetch, clock: Clock) -> None:
    """Case 67: what is not sure is not written off."""
    batch = put(pool, clock, 1, 2, 3)
    batch.hung.add(2)
    assert [pool.status_of(batch, offset) for offset in (1, 2)] == ["ours", "unsure"]
    clock.now += 9.5
    assert pool.status_of(batch, 1) == "unsure"
    batch.lost.add(1)
    assert pool.status_of(batch, 1) == "gone"
    pool.drop(lambda one: one is batch)
    assert pool.status_of(batch, 3) == "gone"
