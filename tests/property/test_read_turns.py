"""Turns of a member's partitions: within its room, and each one's comes."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest

from mqlayer.consuming.ordered import read_turns
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition
from mqlayer.consuming.ordered.read_turns import ReadTurns
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.groups.members import Assignment
from mqlayer.redis.partition_scripts import LockHolder

SIZE = 100
BYTES = 1 << 40


def partitions_of(count: int) -> list[OwnedPartition]:
    made = []
    for number in range(count):
        assignment = Assignment(PartitionId(number), NodeId(1), 0, 1024, 1, 1, release=False)
        made.append(OwnedPartition(assignment, LockHolder("p", number, 1, "m", 1)))
    return made


class Reader:
    """Reads partitions whose backlogs it knows, and settles."""

    def __init__(self, room: int, backlogs: list[int]) -> None:
        self.now = 0.0
        self.partitions = partitions_of(len(backlogs))
        self.share = (max(1, room // len(backlogs)), BYTES)
        self.turns = ReadTurns()
        self.left = dict(zip(self.partitions, backlogs, strict=True))

    def read(self) -> None:
        """Make a pass, of 20 ms."""
        self.now += 0.02
        size = self.turns.turn_size(len(self.partitions), self.share[0])
        with patch.object(read_turns, "clock", lambda: self.now):
            parts = self.turns.choose(self.partitions, self.share, size)
        for part in parts:
            for owned in part.partitions:
                found = min(part.size, self.left[owned])
                owned.room.admit(found, found * SIZE)
                self.left[owned] -= found
                self.turns.note(owned, found, part.size)

    def settle(self, owned: OwnedPartition, count: int) -> None:
        """Settle some of a partition."""
        owned.room.count -= count
        owned.room.bytes -= count * SIZE

    def in_memory(self) -> int:
        """Return how many records are."""
        return sum(owned.room.count for owned in self.partitions)


@pytest.mark.parametrize("seed", range(12))
def test_turns_stay_within_the_room_and_reach_all(seed: int) -> None:
    rng = random.Random(seed)
    room, partitions = rng.randint(400, 8_000), rng.randint(65, 150)
    backlogs = [rng.choice([0, 0, 1, 5, rng.randint(0, 600)]) for _ in range(partitions)]
    reader = Reader(room, backlogs)
    for _ in range(40 + 20 * sum(backlogs) // room + 20 * partitions):
        reader.read()
        assert reader.in_memory() <= max(room, partitions)
        for owned in reader.partitions:
            reader.settle(owned, rng.randint(0, owned.room.count) if rng.random() < 0.5 else owned.room.count)
        if not any(reader.left.values()):
            break
    assert not any(reader.left.values())


def test_a_partition_with_a_long_backlog_leaves_others_their_turn() -> None:
    """Of 64, one has much and the others a little: these are read within as many passes as turns fill the room."""
    reader = Reader(4_000, [100_000] + [200] * 63)
    for _ in range(3 * 63):
        reader.read()
        for owned in reader.partitions:
            reader.settle(owned, owned.room.count)
        if sum(list(reader.left.values())[1:]) == 0:
            break
    assert sum(list(reader.left.values())[1:]) == 0
    assert reader.left[reader.partitions[0]] > 0


def test_where_slow_handlers_hold_the_common_room_others_read_their_own_part() -> None:
    reader = Reader(4_000, [1_000] * 512)
    for _ in range(40):
        reader.read()
    held = [owned for owned in reader.partitions if owned.room.count > 1]
    assert 0 < len(held) < 64
    others = [owned for owned in reader.partitions if owned not in held]
    for _ in range(5):
        reader.now += read_turns.STALL_S
        for owned in others:
            reader.settle(owned, owned.room.count)
        before = {owned: reader.left[owned] for owned in others}
        reader.read()
        assert all(reader.left[owned] < before[owned] for owned in others)
        assert reader.in_memory() <= 4_000


def test_few_partitions_have_shares_and_no_turns() -> None:
    assert ReadTurns().turn_size(32, 125) == 0
    assert ReadTurns().turn_size(64, 62) == read_turns.TURN
    assert ReadTurns().turn_size(4, 25) == 0


def test_a_partition_that_goes_while_it_has_a_backlog_is_not_waited_for() -> None:
    """Else its reader would wait outside of Redis from then on, and find new messages late."""
    reader = Reader(4_000, [1_000] * 64)
    reader.read()
    assert reader.turns.wait_for_room
    reader.turns.follow(reader.partitions[1:])
    assert reader.turns.wait_for_room
    assert not reader.turns.waits(reader.partitions[0])
    reader.turns.follow([])
    assert not reader.turns.wait_for_room
