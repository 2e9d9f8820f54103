"""`position_drop` against a model: any settled ranges, any bound, once or again, on every version of Redis."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mqlayer.redis.node_connection import NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import GroupStart, LockTaken, MessageRun
from mqlayer.redis.pop_scripts import NoBatch, PopBatch
from mqlayer.redis.retention_scripts import DroppedPosition, LogBound
from tests.fixtures.partition_harness import GROUP, PartitionHarness

COUNT = 60
NUMBERS = itertools.count()
RANGES = st.lists(st.tuples(st.integers(1, COUNT), st.integers(0, 12)), max_size=6)


def _facts(harness: PartitionHarness, offset: int) -> bytes:
    reply: Any = raise_for_reply(harness.call(("XRANGE", harness.keys.log, f"{offset}-0", f"{offset}-0"))[0], "")
    return bytes(reply[0][1][1])


def _drop(harness: PartitionHarness, bound: int, before: bytes) -> DroppedPosition | None:
    return harness.drop(LogBound(bound, before, True), GroupStart(GROUP, 0, 1), archived=True)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(ranges=RANGES, bounds=st.lists(st.integers(2, COUNT + 1), min_size=1, max_size=3), taken=st.booleans())
def test_a_position_moves_counts_what_was_unsettled_and_keeps_what_is_settled_above(
    connection: NodeConnection, key_prefix: str, ranges: list[tuple[int, int]], bounds: list[int], taken: bool
) -> None:
    prefix = f"{key_prefix}-{next(NUMBERS)}"
    harness = PartitionHarness(connection, prefix)
    harness.create()
    harness.append(MessageRun(5, 1, COUNT, [field for _ in range(COUNT) for field in (b"1", b"k", b"b")]))
    settled: set[int] = set()
    member = harness.member("m", 1)
    if taken:
        member.acquire()
        for first, more in ranges:
            last = min(COUNT, first + more)
            member.settle([(first, last)])
            settled |= set(range(first, last + 1))
    if not set(range(1, bounds[0])) <= settled:
        assert _drop(harness, bounds[0], b"another record") is None
    dropped: set[int] = set()
    for bound in bounds:
        lost = set(range(1, bound)) - settled - dropped
        position = _drop(harness, bound, _facts(harness, bound - 1))
        dropped |= lost
        assert position is not None
        assert (position.lost, position.dropped) == (len(lost), len(dropped))
    found = harness.member("n", 2).acquire()
    assert isinstance(found, LockTaken)
    assert {offset for offset in range(1, COUNT + 1) if found.has_settled(offset)} == settled | dropped


@pytest.mark.parametrize("lost", ["", "acks", "batches"])
def test_batches_that_are_out_withhold_their_keys_while_their_messages_are_dropped(
    connection: NodeConnection, key_prefix: str, lost: str
) -> None:
    """What was removed of a receiver's state stays noticed: nothing is given again while it may be out."""
    harness = PartitionHarness(connection, key_prefix)
    harness.fill(12)
    receiver = harness.receiver("key", 1)
    first = receiver.receive("a", 6)
    assert isinstance(first, PopBatch)
    receiver.settle("ack", [(first.batch, 2), (first.batch, 5)])
    if lost:
        harness.call(("DEL", harness.group.acks if lost == "acks" else harness.pops.batches))
    dropped = _drop(harness, 5, _facts(harness, 4))
    assert dropped is not None
    assert dropped.offset == 5
    again = receiver.receive("c", 9)
    if lost:
        assert isinstance(again, NoBatch)
        assert again.status == "blocked"
        return
    assert dropped.lost == 3
    # Of the key of 2 and 5 nothing is out any more; 3 and 4 are, with what is behind them.
    assert isinstance(again, PopBatch)
    assert [one.offset for one in again.records] == [8, 11]
    assert receiver.settle("ack", [(first.batch, 1), (first.batch, 3), (first.batch, 4), (first.batch, 6)]) is not None
    rest = receiver.receive("d", 9)
    assert isinstance(rest, PopBatch)
    assert sorted(one.offset for one in rest.records) == [7, 9, 10, 12]
    assert harness.committed == 7
