"""A member's allowance under its group's rate limit.

Readers fetch it from the partitions' buckets (`lua/rate_acquire.lua`). All partitions share it; it is lost with the
member.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final

from mqlayer.consuming.engine.clock import clock
from mqlayer.domain.rates import BUCKET_S, RateLimit
from mqlayer.redis.node_connection import Command, NodeConnection
from mqlayer.redis.partition_scripts import LockHolder
from mqlayer.redis.rate_script import rate_command, rate_reply
from mqlayer.redis.shared_scripts import SharedGroupPartition

GRAIN_S: Final = 0.02
"""High rates are spent in steps of this length."""
SUM_ERROR: Final = 1e-6
LONGEST_WAIT_S: Final = 1.0
"""Longest interval between polls: the rate may change."""
RESERVE_S: Final = 0.5
"""Lifetime of a reservation for parked keys."""


class RateLimiter:
    """One member's allowance, in messages. Thread-safe; unlimited without a limit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limit: RateLimit | None = None
        self._partitions = 1
        self._permits = 0.0
        # Permits reserved for parked keys, until when, and whether readers begin first.
        self._reserved, self._reserved_until = 0.0, 0.0
        self._readers_first = False

    @property
    def limit(self) -> RateLimit | None:
        """The group's limit, or None."""
        return self._limit

    def configure(self, limit: RateLimit | None, partitions: int) -> None:
        """Set limit and number of partitions."""
        with self._lock:
            if limit is None or self._limit is None:
                self._permits = 0.0
            self._limit, self._partitions = limit, max(1, partitions)
            self._permits = min(self._permits, self._most())

    def needed(self) -> float:
        """Return the request per bucket."""
        with self._lock:
            return max(0.0, self._most() - self._permits) / self._partitions

    def add(self, given: float) -> None:
        """Add fetched rate."""
        with self._lock:
            self._permits += given

    def available(self, most: int) -> int:
        """Return how many parked messages may begin."""
        with self._lock:
            # The tolerance absorbs rounding of summed fractions.
            return most if self._limit is None else max(0, min(most, int(self._permits + SUM_ERROR)))

    def available_to_read(self, most: int) -> int:
        """Return how many stream messages may begin."""
        with self._lock:
            if self._limit is None:
                return most
            return max(0, min(most, int(self._permits - self._reserved_now() + SUM_ERROR)))

    def reserve_for_parked(self) -> None:
        """Reserve for due parked keys; not twice without a read between."""
        with self._lock:
            if self._limit is not None and not self._readers_first:
                self._reserved, self._reserved_until = max(1.0, self._most() / 4), clock() + RESERVE_S

    def acquire_share(self, most: int, among: int) -> int:
        """Take one parked key's share, at least 1."""
        with self._lock:
            if self._limit is None:
                return most
            taken = max(1, min(most, int(self._permits + SUM_ERROR) // max(1, among)))
            self._permits -= taken
            self._reserved, self._readers_first = max(0.0, self._reserved - taken), True
            return taken

    def return_unused(self, taken: int, begun: int) -> None:
        """Give back parked keys' permits."""
        with self._lock:
            if self._limit is not None:
                self._permits += taken - begun

    def consume(self, count: int) -> None:
        """Count begun stream messages; the allowance may go negative."""
        with self._lock:
            if self._limit is not None:
                self._permits -= count
                self._readers_first = self._readers_first and count == 0

    def wait_s(self) -> float:
        """Return seconds until a read is worthwhile; 0 for now."""
        with self._lock:
            return self._wait_s(self._reserved_now())

    def fetch_wait_s(self) -> float:
        """Return `wait_s` without the reservation."""
        with self._lock:
            return self._wait_s(0.0)

    def max_in_flight(self, concurrency: int) -> int | None:
        """Return the bound of unsettled messages, against floods."""
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
    """Fetches rate from the buckets of a node's partitions."""

    def __init__(self, rate_limiter: RateLimiter) -> None:
        self._rate_limiter = rate_limiter
        self._ask_at = 0.0

    def due(self) -> bool:
        """Whether to poll now."""
        return self._rate_limiter.limit is not None and clock() >= self._ask_at

    def commands(
        self, connection: NodeConnection, holders: Iterable[LockHolder | SharedGroupPartition]
    ) -> list[Command]:
        """Return the polling commands."""
        limit = self._rate_limiter.limit
        if limit is None:
            return []
        self._polled()
        wanted = self._rate_limiter.needed()
        return [
            rate_command(connection, h.prefix, h.partition, h.group_id, limit.share, wanted=wanted) for h in holders
        ]

    def add(self, replies: Sequence[Any], address: str) -> None:
        """Add what the buckets gave."""
        self._rate_limiter.add(sum(rate_reply(reply, address).granted for reply in replies))
        self._polled()

    def _polled(self) -> None:
        self._ask_at = clock() + max(GRAIN_S / 2, self._rate_limiter.fetch_wait_s())
