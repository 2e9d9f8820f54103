"""How many key queues a worker takes at once, and which of them are forgotten afterwards."""

from __future__ import annotations

import pytest

from mqlayer.consuming.engine.clock import Lease
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, OwnershipState
from mqlayer.consuming.ordered.ready_queues import CHUNK, LARGEST_CHUNK, ReadyQueues
from mqlayer.domain.message import Record, records_of, records_read
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.groups.members import Assignment
from mqlayer.redis.partition_scripts import LockHolder, LockTaken

KEYS = 1_000
WORKERS = 8


def opened() -> OwnedPartition:
    """Return an owned partition."""
    assignment = Assignment(PartitionId(1), NodeId(1), 0, 1024, 1, 1, release=False)
    owned = OwnedPartition(assignment, LockHolder("p", 1, 1, "m", 1))
    owned.open(LockTaken(1, KEYS + 1, 1, b"", {}))
    return owned


def records(first: int, last: int) -> list[Record]:
    """Return a record for each offset, with a key of its own."""
    return [Record(offset, b"1:1:%d:0" % offset, b"k%d" % offset, b"body") for offset in range(first, last + 1)]


def queues_with(owned: OwnedPartition) -> ReadyQueues:
    """Return ready queues of a thousand keys, for eight workers."""
    lease = Lease()
    lease.until = float("inf")
    queues = ReadyQueues(lease)
    for _ in range(WORKERS):
        queues.new_local_queue()
    queues.enqueue(owned.add(records(1, KEYS), KEYS))
    return queues


def filled(queues: ReadyQueues) -> list[KeyQueue]:
    """Return what the first worker takes."""
    local_queue = queues.local_queues[0]
    queues.fill(local_queue)
    return [local_queue.popleft() for _ in range(len(local_queue))]


@pytest.mark.parametrize(
    ("message_s", "taken"),
    [(0.0, LARGEST_CHUNK), (0.000_002, LARGEST_CHUNK), (0.000_02, 100), (0.000_1, CHUNK), (0.01, 1)],
    ids=["0 us", "2 us", "20 us", "100 us", "10 ms"],
)
def test_a_worker_takes_work_of_two_milliseconds_or_its_share(message_s: float, taken: int) -> None:
    queues = queues_with(opened())
    for _ in range(60):
        queues.note_pace(1, message_s)
    assert abs(len(filled(queues)) - taken) <= 1


def test_a_worker_takes_nothing_of_a_partition_that_is_closed() -> None:
    closed, owned = opened(), opened()
    queues = queues_with(closed)
    for _ in range(60):
        queues.note_pace(1, 0.000_1)
    queues.enqueue(owned.add(records(1, 1), 1))
    closed.drain(0.0)
    assert [key_queue.owned for key_queue in filled(queues)] == [owned]
    assert (closed.running, owned.running) == (0, 1)


def test_handled_queues_are_forgotten_unless_more_was_read_meanwhile() -> None:
    owned = opened()
    queues = queues_with(owned)
    for _ in range(60):
        queues.note_pace(1, 0.000_1)
    taken = filled(queues)
    again = taken[3].key
    owned.add([Record(KEYS + 1, b"1:1:9999:0", again, b"body")], KEYS + 1)
    for key_queue in taken:
        queues.done(key_queue)
    with queues.lock:
        queues.collect_finished()
    assert owned.running == 0
    assert len(owned.queues) == KEYS - len(taken) + 1
    assert again in owned.queues
    assert again in {key_queue.key for key_queue in queues.ready}


def test_a_closed_partitions_handled_queues_end_one_by_one() -> None:
    owned = opened()
    queues = queues_with(owned)
    taken = filled(queues)
    owned.drain(0.0)
    assert owned.state is OwnershipState.DRAINING
    queues.done(taken[0])
    with queues.lock:
        queues.collect_finished()
    assert owned.running == 0
    assert taken[0].key not in owned.queues


@pytest.mark.parametrize("offsets", [[], [7], [7, 8, 9], [7, 9], [7, 8, 10, 11]])
def test_records_of_a_read_have_the_offsets_of_their_ids(offsets: list[int]) -> None:
    entries = [[b"%d-0" % offset, [b"m", b"1:1:1:0", b"k", b"key", b"b", b"%d" % offset]] for offset in offsets]
    assert records_read(entries) == records_of(entries)
    assert [(record.offset, record.body) for record in records_read(entries)] == [(o, b"%d" % o) for o in offsets]
