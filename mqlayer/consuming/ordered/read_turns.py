"""Which partitions of a backlog are read, in turn, where a member has many: much of few costs less than little of all.

A quarter of a member's room stays with its partitions, the rest goes to those whose turn it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition

TURN: Final = 125
"""Records of a turn, and the share of a partition below which there are turns."""
PASSES: Final = 4
"""How many passes fill a member's room."""
STALL_S: Final = 0.1
"""Where slow handlers hold the common room for so long, waiting partitions read what their own part gives."""


class ReadPart(NamedTuple):
    """Partitions to read in one call, so many records each."""

    partitions: list[OwnedPartition]
    size: int


class ReadTurns:
    """Chooses for one node's reader."""

    def __init__(self) -> None:
        # Partitions whose last read left records, in the order of their turns.
        self._behind: dict[OwnedPartition, None] = {}
        self._turned_at = clock()

    def turn_size(self, partitions: int, share: int) -> int:
        """Return the records of a turn; 0: each partition's own share is enough."""
        size = min(TURN, partitions * share // 4)
        return size if share < size else 0

    def follow(self, partitions: Sequence[OwnedPartition]) -> None:
        """Forget others: dropped ones, or those that have been read to their end."""
        known = set(partitions)
        self._behind = {owned: None for owned in self._behind if owned in known}

    def choose(
        self, partitions: Sequence[OwnedPartition], share: tuple[int, int], size: int
    ) -> tuple[ReadPart, ReadPart]:
        """Return those whose turn it is, and those that read within their own part. `share`: records, bytes."""
        part, bytes_part = max(1, share[0] // 4), max(1, share[1] // 4)
        left = (share[0] - part) * len(partitions) - sum(max(0, one.room.count - part) for one in partitions)
        bytes_left: float = (share[1] - bytes_part) * len(partitions)
        bytes_left -= sum(max(0, one.room.bytes - bytes_part) for one in partitions)
        now = clock()
        turn: list[OwnedPartition] = []
        # Some at a time: each pass looks at all partitions, and handlers shall not wait for a long one.
        most = max(1, share[0] * len(partitions) // (PASSES * size))
        for owned in self._behind if left >= min(len(self._behind), most) * size else ():
            taken_bytes = size * owned.room.record_bytes
            if len(turn) == most or bytes_left < taken_bytes:
                break
            if owned.reach >= size and owned.room.count <= part:
                turn.append(owned)
                left, bytes_left = left - size, bytes_left - taken_bytes
        if turn or not self._behind:
            self._turned_at = now
        stalls = now - self._turned_at >= STALL_S
        in_turn = set(turn)
        own: list[OwnedPartition] = []
        count = part
        for owned in partitions:
            if owned in in_turn or (owned in self._behind and not stalls):
                continue
            capacity = owned.room.capacity(part, bytes_part, part, owned.reach)
            if capacity:
                own.append(owned)
                count = min(count, capacity)
        return ReadPart(turn, size), ReadPart(own, count)

    @property
    def wait_for_room(self) -> bool:
        """Whether some have their turn once there is room."""
        return bool(self._behind)

    def waits(self, owned: OwnedPartition) -> bool:
        """Whether a partition waits for its turn."""
        return owned in self._behind

    def note(self, owned: OwnedPartition, found: int, count: int) -> None:
        """Note how many records of those asked for a partition had."""
        self._behind.pop(owned, None)
        if found >= count:
            self._behind[owned] = None
