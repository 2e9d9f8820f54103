"""How many messages a member may begin now, where its group's rate is limited.

Readers take what the buckets of its partitions give (lua/rate_take.lua) and add it here; whoever begins messages takes
it off again: a read for what it may bring, a retry, a parked key that is due. All partitions of a member share one
allowance, so a quiet one lends its share to a busy one. What is here is lost with the member, and is little: the rest
stays in the buckets, which outlive it.
"""

from __future__ import annotations

import threading
from typing import Final

from mqlayer.consuming.clock import clock
from mqlayer.domain.rates import KEPT_S, RateLimit

GRAIN_S: Final = 0.02
"""A member with a high rate begins what is due this often, not each message by itself."""
SUM_ERROR: Final = 1e-6
LONGEST_WAIT_S: Final = 1.0
"""A member looks at its buckets this often, whatever its rate: a higher one may be in force."""
ASIDE_S: Final = 0.5
"""How long something is kept for parked keys that nobody asks for any more."""


class Allowance:
    """What one member may begin. Safe to use from many threads; without a limit everything may be begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limit: RateLimit | None = None
        self._held = 1
        self._left = 0.0
        # What readers leave for parked keys, until when; and whether it is theirs to begin something first.
        self._aside, self._aside_until = 0.0, 0.0
        self._readers_first = False

    @property
    def limit(self) -> RateLimit | None:
        """The limit of the group; None: there is none."""
        return self._limit

    def follow(self, limit: RateLimit | None, held: int) -> None:
        """Go by another limit, or hold another number of partitions."""
        with self._lock:
            if limit is None or self._limit is None:
                self._left = 0.0
            self._limit, self._held = limit, max(1, held)
            self._left = min(self._left, self._most())

    def wanted(self) -> float:
        """Return how much each bucket of this member is to be asked for."""
        with self._lock:
            return max(0.0, self._most() - self._left) / self._held

    def add(self, given: float) -> None:
        """Add what a bucket gave."""
        with self._lock:
            self._left += given

    def look(self, most: int) -> int:
        """Return how many messages may be begun now, `most` without a limit: parked ones; others by `look_to_read`."""
        with self._lock:
            # Parts of messages put together: what is missing is the error of a sum.
            return most if self._limit is None else max(0, min(most, int(self._left + SUM_ERROR)))

    def look_to_read(self, most: int) -> int:
        """Return how many messages of streams may be begun now: what is kept for parked keys is not among them."""
        with self._lock:
            if self._limit is None:
                return most
            return max(0, min(most, int(self._left - self._kept_aside() + SUM_ERROR)))

    def keep_aside(self) -> None:
        """Have readers leave something for parked keys that are due: they fetch what there is, and would take it all.

        Not twice in a row: readers begin something between. Where they have nothing to read, what is left is there
        for parked keys anyway.
        """
        with self._lock:
            if self._limit is not None and not self._readers_first:
                self._aside, self._aside_until = max(1.0, self._most() / 4), clock() + ASIDE_S

    def portion(self, most: int, among: int) -> int:
        """Take what one of several parked keys may begin, 1 at the least; `settle_portions` when that is known."""
        with self._lock:
            if self._limit is None:
                return most
            taken = max(1, min(most, int(self._left + SUM_ERROR) // max(1, among)))
            self._left -= taken
            self._aside, self._readers_first = max(0.0, self._aside - taken), True
            return taken

    def settle_portions(self, taken: int, begun: int) -> None:
        """Give back what was taken for parked keys and not begun."""
        with self._lock:
            if self._limit is not None:
                self._left += taken - begun

    def spend(self, count: int) -> None:
        """Note that so many messages of streams were begun.

        It may be more than was there, by a read of each node: then that much less is begun after it.
        """
        with self._lock:
            if self._limit is not None:
                self._left -= count
                self._readers_first = self._readers_first and count == 0

    def wait_s(self) -> float:
        """Return how long until something worth a read may be begun; 0 where it may be now."""
        with self._lock:
            return self._wait_s(self._kept_aside())

    def fetch_wait_s(self) -> float:
        """Return how long until as much as is worth a read was fetched, whoever begins it."""
        with self._lock:
            return self._wait_s(0.0)

    def most_in_hand(self, concurrency: int) -> int | None:
        """Return how much a member may have read and not settled: no flood follows when slow handlers get quick."""
        limit = self._limit
        return None if limit is None else int(limit.burst) + 2 * concurrency

    def _wait_s(self, aside: float) -> float:
        if self._limit is None:
            return 0.0
        missing = max(1.0, self._per_s() * GRAIN_S) + aside - self._left
        return min(LONGEST_WAIT_S, missing / self._per_s()) if missing > SUM_ERROR else 0.0

    def _kept_aside(self) -> float:
        return self._aside if self._aside and clock() < self._aside_until else 0.0

    def _per_s(self) -> float:
        limit = self._limit
        return 0.0 if limit is None else max(1e-9, limit.per_s * self._held / limit.partitions)

    def _most(self) -> float:
        limit = self._limit
        return 0.0 if limit is None else min(max(1.0, limit.burst), max(1.0, self._per_s() * KEPT_S))


class Pacer:
    """When the reader of one node asks its buckets again: not sooner than there is something in them."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._ask_at = 0.0

    def due(self) -> bool:
        """Say whether to ask now."""
        return self._allowance.limit is not None and clock() >= self._ask_at

    def asked(self) -> None:
        """Note that the buckets were asked."""
        self._ask_at = clock() + max(GRAIN_S / 2, self._allowance.fetch_wait_s())
