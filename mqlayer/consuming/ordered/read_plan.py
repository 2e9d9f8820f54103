"""What one node's reader asks for next."""

from __future__ import annotations

from typing import Final

from mqlayer.consuming.engine.rate_limiter import RateLimiter
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition
from mqlayer.consuming.ordered.ownership import Ownership
from mqlayer.consuming.ordered.read_turns import ReadPart, ReadTurns

READ_COUNT: Final = 500
SCAN_COUNT: Final = 4_000
SCAN_BYTES: Final = 4 * 1024 * 1024
"""Bounds of a read behind a backlog."""


class ReadPlan:
    """Chooses partitions and counts within the member's room and rate."""

    def __init__(self, ownership: Ownership, dispatcher: Dispatcher, rate_limiter: RateLimiter) -> None:
        self._ownership, self._dispatcher, self._rate_limiter = ownership, dispatcher, rate_limiter
        self.turns = ReadTurns()
        # Rotates the partitions where the rate allows less than one message each.
        self._round = 0

    def parts(self, partitions: list[OwnedPartition], *, filtered: bool) -> list[ReadPart]:
        """Return what to read; with a filter, one part."""
        plain = not filtered and self._rate_limiter.limit is None and not self._dispatcher.classes.active
        if plain and partitions and all(owned.backlogs is None for owned in partitions):
            shares = self._ownership.shares(partitions[0])
            size = self.turns.turn_size(len(partitions), shares[0])
            if size:
                self.turns.follow(partitions)
                return self._in_turn(partitions, shares, size)
        self.turns.follow([])
        # Behind a backlog others' messages are looked for in large steps: handlers leave the reader little time.
        most = SCAN_COUNT if any(owned.backlogs for owned in partitions) else READ_COUNT
        capacities = [(owned, self._read_capacity(owned, most)) for owned in partitions]
        for owned, capacity in capacities:
            self._dispatcher.note_full(owned, full=capacity == 0)
        readable = [(owned, capacity) for owned, capacity in capacities if capacity > 0]
        count = min([most, *(capacity for _, capacity in readable)])
        return self._within_rate([owned for owned, _ in readable], count)

    def capacity(self, owned: OwnedPartition) -> int:
        """Return how many records of a partition have room."""
        return owned.room.capacity(*self._ownership.shares(owned), READ_COUNT, owned.reach)

    def _read_capacity(self, owned: OwnedPartition, most: int) -> int:
        keeps = self._rate_limiter.limit is None
        may_read = self._dispatcher.classes.may_read(owned, self._ownership.shares(owned), keeps=keeps)
        if may_read is None:
            return self.capacity(owned)
        # What finds no room waits as offsets.
        return min(most, 1 + int(SCAN_BYTES / owned.room.record_bytes), max(0, owned.reach)) if may_read else 0

    def _in_turn(self, partitions: list[OwnedPartition], shares: tuple[int, int], size: int) -> list[ReadPart]:
        parts = self.turns.choose(partitions, shares, size)
        read = {owned for part in parts for owned in part.partitions}
        for owned in partitions:
            self._dispatcher.note_full(owned, full=owned not in read)
        return [part for part in parts if part.partitions]

    def _within_rate(self, readable: list[OwnedPartition], count: int) -> list[ReadPart]:
        rate_limiter = self._rate_limiter
        if rate_limiter.limit is None or not readable:
            return [ReadPart(readable, count)] if readable else []
        left = 0 if rate_limiter.wait_s() > 0 else rate_limiter.available_to_read(count * len(readable))
        self._round += 1
        if not left:
            return []
        at = self._round % len(readable)
        # The reader drops records beyond the rate: only the read shows which partitions have any.
        return [ReadPart(readable[at:] + readable[:at], max(1, left // len(readable)))]
