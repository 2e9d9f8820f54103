"""Which pull locks are checked with a read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition

BUSY_S: Final = 1.0
MOST: Final = 16
"""Of many partitions with few messages each, a read finds some: the others' checks would be for nothing."""


class LockChecks:
    """Chooses up to MOST partitions that had records within BUSY_S, the latest first, and one of the others in turn."""

    def __init__(self) -> None:
        self._busy_until: dict[OwnedPartition, float] = {}
        self._turn = 0

    def beside(self, readable: Sequence[OwnedPartition], sure: Sequence[OwnedPartition] = ()) -> list[OwnedPartition]:
        """Return the partitions to check in the write of a read. `sure`: those that have records."""
        now, known = clock(), set(readable)
        self._busy_until = {owned: until for owned, until in self._busy_until.items() if until > now}
        latest = (owned for owned in reversed(self._busy_until) if owned in known)
        self._turn += 1
        # Each once.
        return list({*(sure or islice(latest, MOST)), readable[self._turn % len(readable)]})

    def found(self, owned: OwnedPartition) -> None:
        """Note that a partition had records."""
        self._busy_until.pop(owned, None)
        self._busy_until[owned] = clock() + BUSY_S
