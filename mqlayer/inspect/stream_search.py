"""Bounded searches in a topic's streams; no body leaves a node.

By identity or time a search halves a partition: seqs of a source and LP rise with offsets, publishing times nearly do.
By key or header it looks at each record of a range.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from mqlayer.domain.message import Identity, Record, records_of
from mqlayer.errors import MqlayerError
from mqlayer.groups.start_positions import UndeletedPartition
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection, raise_for_reply
from mqlayer.redis.read_scripts import SEARCH_LIMIT, FoundRecord, RecordFilter, search_command, search_reply
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.runtime import Runtime

RECORDS_LIMIT: Final = 200_000
"""Records that one search looks at, over all partitions."""


class BudgetSpent(MqlayerError):
    """A search looked at as many records as it may, or for as long."""


class OffsetBounds(NamedTuple):
    """The offsets [first, past) that a stream holds."""

    first: int
    past: int


class StreamSearch:
    """Searches partitions within one budget of records, and of seconds. For one thread; close it."""

    def __init__(self, runtime: Runtime, *, records: int = RECORDS_LIMIT, within_s: float = math.inf) -> None:
        self._runtime = runtime
        self._pool = NodePool.of_registered(runtime, RedisRole.VIEWER)
        self._limit = self._left = records
        self._within_s, self._ends_at = within_s, time.monotonic() + within_s
        self.reached: tuple[int, int] | None = None
        """Partition and offset behind the range that `backward` searches next."""

    @property
    def looked(self) -> int:
        """Records looked at so far."""
        return self._limit - self._left

    def close(self) -> None:
        """Close its connections."""
        self._pool.close()

    def bounds(self, partition: UndeletedPartition) -> OffsetBounds:
        """Return a partition's kept offsets; none for a lost or deleted one. Raises StoreUnavailable."""
        self._check_time()
        connection = self._pool.to(partition.node)
        meta_key = partition_keys(self._runtime.prefix, partition.partition).meta
        (reply,) = connection.call([("HMGET", meta_key, "state", "next", "first")])
        state, past, first = raise_for_reply(reply, connection.node.address)
        if state in (None, b"deleted"):
            return OffsetBounds(1, 1)
        return OffsetBounds(int(first), int(past))

    def find(self, partition: UndeletedPartition, identity: Identity) -> Record | None:
        """Return the record of an identity, with its body. Raises BudgetSpent, StoreUnavailable."""
        low, high = self.bounds(partition)
        of_chain = RecordFilter(begins=b"%d:%d:" % identity[:2])
        while high - low > SEARCH_LIMIT:
            middle = (low + high) // 2
            hit = self._first(partition, of_chain, OffsetBounds(middle, high))
            if hit is None or hit.record.identity.seq > identity.seq:
                high = middle
            elif hit.record.identity.seq < identity.seq:
                low = hit.offset + 1
            else:
                return self.read(partition, hit.offset)
        exact = RecordFilter(begins=b"%d:%d:%d:" % identity)
        hit = self._first(partition, exact, OffsetBounds(low, high))
        return None if hit is None else self.read(partition, hit.offset)

    def mark(self, partition: UndeletedPartition, identity: Identity) -> int:
        """Return the highest seq of an identity's chain that ever was in a partition; 0 for none."""
        connection = self._pool.to(partition.node)
        marks_key = partition_keys(self._runtime.prefix, partition.partition).marks
        (reply,) = connection.call([("HMGET", marks_key, b"%d:%d" % identity[:2])])
        (mark,) = raise_for_reply(reply, connection.node.address)
        return int(mark or 0)

    def offset_at(self, partition: UndeletedPartition, at_ms: int) -> int:
        """Return the first offset published at a time or later; publishers' clocks may make it some records off."""
        low, high = self.bounds(partition)
        while low < high:
            middle = (low + high) // 2
            hit = self._first(partition, RecordFilter(), OffsetBounds(middle, high))
            if hit is not None and hit.record.at_ms < at_ms:
                low = hit.offset + 1
            else:
                high = middle
        return low

    def forward(
        self, partition: UndeletedPartition, wanted: RecordFilter, within: OffsetBounds, limit: int
    ) -> Iterator[FoundRecord]:
        """Yield matches in order. Raises BudgetSpent."""
        low = within.first
        while low < within.past and limit > 0:
            low, found = self._call(partition, wanted, OffsetBounds(low, within.past), limit)
            yield from found
            limit -= len(found)

    def backward(
        self, partition: UndeletedPartition, wanted: RecordFilter, within: OffsetBounds
    ) -> Iterator[FoundRecord]:
        """Yield matches, the latest first. Raises BudgetSpent."""
        high = within.past
        while high > within.first:
            low = max(within.first, high - SEARCH_LIMIT)
            self.reached = partition.partition, high
            yield from reversed(list(self.forward(partition, wanted, OffsetBounds(low, high), SEARCH_LIMIT)))
            high = low

    def read(self, partition: UndeletedPartition, offset: int) -> Record | None:
        """Return the record of an offset, with its body. Raises StoreUnavailable."""
        connection = self._pool.to(partition.node)
        return read_record(connection, self._runtime.prefix, partition.partition, offset)

    def _check_time(self) -> None:
        if time.monotonic() > self._ends_at:
            raise BudgetSpent(f"the search took {self._within_s:g} s and looked at {self.looked:,} records")

    def _first(self, partition: UndeletedPartition, wanted: RecordFilter, within: OffsetBounds) -> FoundRecord | None:
        return next(self.forward(partition, wanted, within, 1), None)

    def _call(
        self, partition: UndeletedPartition, wanted: RecordFilter, within: OffsetBounds, limit: int
    ) -> tuple[int, list[FoundRecord]]:
        if self._left <= 0:
            raise BudgetSpent(f"the search looked at {self._limit:,} records")
        self._check_time()
        connection, prefix, name = self._pool.to(partition.node), self._runtime.prefix, partition.partition
        command = search_command(
            connection, prefix, name, wanted, first=within.first, past=within.past, limit=min(limit, SEARCH_LIMIT)
        )
        (reply,) = connection.call([command])
        ahead, found = search_reply(reply, connection.node.address)
        self._left -= min(ahead - within.first, SEARCH_LIMIT)
        return ahead, found


def read_record(connection: NodeConnection, prefix: str, partition: int, offset: int) -> Record | None:
    """Return the record of an offset, or None."""
    log, record_id = partition_keys(prefix, partition).log, f"{offset}-0"
    (reply,) = connection.call([("XRANGE", log, record_id, record_id)])
    return next(iter(records_of(raise_for_reply(reply, connection.node.address))), None)
