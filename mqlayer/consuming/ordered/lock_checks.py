"""Which pull locks are checked with a read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition

BUSY_S: Final = 1.0


class LockChecks:
    """Chooses partitions that had records within BUSY_S, and one of the others in turn."""

    def __init__(self) -> None:
        self._busy_until: dict[OwnedPartition, float] = {}
        self._turn = 0

    def beside(self, readable: Sequence[OwnedPartition]) -> list[OwnedPartition]:
        """Return the partitions to check in the write of a read."""
        now = clock()
        self._busy_until = {owned: until for owned, until in self._busy_until.items() if until > now}
        chosen = [owned for owned in readable if owned in self._busy_until]
        self._turn += 1
        next_idle = readable[self._turn % len(readable)]
        return chosen if next_idle in self._busy_until else [*chosen, next_idle]

    def found(self, owned: OwnedPartition) -> None:
        """Note that a partition had records."""
        self._busy_until[owned] = clock() + BUSY_S
