"""How many messages a member may begin now, where its group's rate is limited.

Readers take what the buckets of its partitions give (lua/rate_acquire.lua) and add it here; whoever begins messages
takes it off again: a read for what it may bring, a retry, a parked key that is due. All partitions of a member share
one allowance, so a quiet one lends its share to a busy one. What is here is lost with the member, and is little: the
rest stays in the buckets, which outlive it.
"""

from __future__ import annotations

import threading
from typing import Final

from mqlayer.consuming.engine.clock import clock
from mqlayer.domain.rates import BUCKET_S, RateLimit

GRAIN_S: Final = 0.02
"""A member with a high rate begins what is due this often, not each message by itself."""
SUM_ERROR: Final = 1e-6
LONGEST_WAIT_S: Final = 1.0
"""A member looks at its buckets this often, whatever its rate: a higher one may be in force."""
RESERVE_S: Final = 0.5
"""How long something is kept for parked keys that nobody asks for any more."""


class RateLimiter:
    """What one member may begin. Safe to use from many threads; without a limit everything may be begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limit: RateLimit | None = None
        self._partitions = 1
        self._permits = 0.0
        # What readers leave for parked keys, until when; and whether it is theirs to begin something first.
        self._reserved, self._reserved_until = 0.0, 0.0
        self._readers_first = False

    @property
    def limit(self) -> RateLimit | None:
        """The limit of the group; None: there is none."""
        return self._limit

    def configure(self, limit: RateLimit | None, partitions: int) -> None:
        """Go by another limit, or hold another number of partitions."""
        with self._lock:
            if limit is None or self._limit is None:
                self._permits = 0.0
            self._limit, self._partitions = limit, max(1, partitions)
            self._permits = min(self._permits, self._most())

    def needed(self) -> float:
        """Return how much each bucket of this member is to be asked for."""
        with self._lock:
            return max(0.0, self._most() - self._permits) / self._partitions

    def add(self, given: float) -> None:
        """Add what a bucket gave."""
        with self._lock:
            self._permits += given

    def available(self, most: int) -> int:
        """Return how many messages may be begun now, `most` without a limit: parked ones; others by
        `available_to_read`."""
        with self._lock:
            # Parts of messages put together: what is missing is the error of a sum.
            return most if self._limit is None else max(0, min(most, int(self._permits + SUM_ERROR)))

    def available_to_read(self, most: int) -> int:
        """Return how many messages of streams may be begun now: what is kept for parked keys is not among them."""
        with self._lock:
            if self._limit is None:
                return most
            return max(0, min(most, int(self._permits - self._reserved_now() + SUM_ERROR)))

    def reserve_for_parked(self) -> None:
        """Have readers leave something for parked keys that are due: they fetch what there is, and would take it all.

        Not twice in a row: readers begin something between. Where they have nothing to read, what is left is there
        for parked keys anyway.
        """
        with self._lock:
            if self._limit is not None and not self._readers_first:
                self._reserved, self._reserved_until = max(1.0, self._most() / 4), clock() + RESERVE_S

    def acquire_share(self, most: int, among: int) -> int:
        """Take what one of several parked keys may begin, 1 at the least; `return_unused` when that is known."""
        with self._lock:
            if self._limit is None:
                return most
            taken = max(1, min(most, int(self._permits + SUM_ERROR) // max(1, among)))
            self._permits -= taken
            self._reserved, self._readers_first = max(0.0, self._reserved - taken), True
            return taken

    def return_unused(self, taken: int, begun: int) -> None:
        """Give back what was taken for parked keys and not begun."""
        with self._lock:
            if self._limit is not None:
                self._permits += taken - begun

    def consume(self, count: int) -> None:
        """Note that so many messages of streams were begun.

        It may be more than was there, by a read of each node: then that much less is begun after it.
        """
        with self._lock:
            if self._limit is not None:
                self._permits -= count
                self._readers_first = self._readers_first and count == 0

    def wait_s(self) -> float:
        """Return how long until something worth a read may be begun; 0 where it may be now."""
        with self._lock:
            return self._wait_s(self._reserved_now())

    def fetch_wait_s(self) -> float:
        """Return how long until as much as is worth a read was fetched, whoever begins it."""
        with self._lock:
            return self._wait_s(0.0)

    def max_in_flight(self, concurrency: int) -> int | None:
        """Return how much a member may have read and not settled: no flood follows when slow handlers get quick."""
        limit = self._limit
        return None if limit is None else int(limit.burst) + 2 * concurrency

    def _wait_s(self, reserved: float) -> float:
        if self._limit is None:
            return 0.0
        missing = max(1.0, self._per_s() * GRAIN_S) + reserved - self._permits
        return min(LONGEST_WAIT_S, missing / self._per_s()) if missing > SUM_ERROR else 0.0

    def _reserved_now(self) -> float:
        return self._reserved if self._reserved and clock() < self._reserved_until else 0.0

    def _per_s(self) -> float:
        limit = self._limit
        return 0.0 if limit is None else max(1e-9, limit.per_s * self._partitions / limit.partitions)

    def _most(self) -> float:
        limit = self._limit
        return 0.0 if limit is None else min(max(1.0, limit.burst), max(1.0, self._per_s() * BUCKET_S))


class RatePoller:
    """When the reader of one node asks its buckets again: not sooner than there is something in them."""

    def __init__(self, rate_limiter: RateLimiter) -> None:
        self._rate_limiter = rate_limiter
        self._ask_at = 0.0

    def due(self) -> bool:
        """Say whether to ask now."""
        return self._rate_limiter.limit is not None and clock() >= self._ask_at

    def polled(self) -> None:
        """Note that the buckets were asked."""
        self._ask_at = clock() + max(GRAIN_S / 2, self._rate_limiter.fetch_wait_s())
