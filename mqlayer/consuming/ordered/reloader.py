"""Read records of a partition again: those of spilled key queues, and of classes' backlogs."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, Final

from mqlayer.consuming.engine.rate_limiter import RateLimiter
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, OwnershipState
from mqlayer.consuming.ordered.record_intake import log_missing
from mqlayer.domain.message import Record, records_of
from mqlayer.domain.offsets import OffsetRange, as_ranges
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Command, NodeConnection, raise_for_reply

AT_ONCE: Final = 2_000
RANGES: Final = 8
SCAN: Final = 4
"""More ranges than that are one, if it has no more than so many times the records."""


class Reloader:
    """Reads for a node's reader. `check` asks for the pull lock, and `ours` follows its answer."""

    def __init__(
        self,
        connection: NodeConnection,
        rate_limiter: RateLimiter,
        dispatcher: Dispatcher,
        *,
        check: Callable[[OwnedPartition], Command],
        ours: Callable[[OwnedPartition, Any], bool],
    ) -> None:
        self._connection, self._rate_limiter, self._dispatcher = connection, rate_limiter, dispatcher
        self._check, self._ours = check, ours

    def load_backlogs(self, partitions: list[OwnedPartition]) -> bool:
        """Load the first messages of backlogs, of a class per partition, in one call; say whether any had room."""
        plans: list[tuple[OwnedPartition, bytes, list[int]]] = []
        for owned in partitions:
            found = self._dispatcher.classes.to_load(owned, AT_ONCE)
            if found is not None:
                plans.append((owned, *found))
        reads = self._read([(owned, offsets) for owned, _, offsets in plans]) if plans else []
        for (owned, name, offsets), records in zip(plans, reads, strict=True):
            if records is not None:
                self._dispatcher.classes.load(owned, name, offsets, records)
        return bool(plans)

    def reload(self, owned: OwnedPartition, capacity: int) -> None:
        """Reload spilled key queues whose backoff is over."""
        key_queues = self._dispatcher.queues_to_reload(owned)
        budget = max(capacity // 2, 1 if capacity or owned.room.count <= owned.room.spilled else 0)
        try:
            while key_queues and budget > 0 and owned.state is OwnershipState.OPEN and self._may_start(key_queues[0]):
                budget -= self._reload_queue(owned, key_queues[0], budget)
                del key_queues[0]
        finally:
            if key_queues:
                self._dispatcher.not_reloaded(owned, key_queues)

    def _may_start(self, key_queue: KeyQueue) -> bool:
        return not key_queue.failed_before or self._rate_limiter.available_to_read(1) > 0

    def _reload_queue(self, owned: OwnedPartition, key_queue: KeyQueue, limit: int) -> int:
        later = key_queue.spilled or array("q")
        # The head may fail or find no room again; records behind it would be read for nothing.
        parked_key = key_queue.parked_key
        alone = later[0] in owned.attempts or (parked_key is not None and parked_key.probing)
        wanted = list(later[: 1 if alone else limit])
        (records,) = self._read([(owned, wanted)])
        if records is not None:
            if key_queue.failed_before:
                self._rate_limiter.consume(len(records))
            self._dispatcher.reload(key_queue, records, len(wanted))
        return len(wanted)

    def _read(self, wanted: list[tuple[OwnedPartition, list[int]]]) -> list[list[Record] | None]:
        """Return the records of partitions' offsets; None without the lock."""
        commands: list[Command] = []
        counts: list[int] = []
        for owned, offsets in wanted:
            ranges = _ranges(offsets)
            counts.append(len(ranges))
            commands += [("XRANGE", log_of(owned), b"%d-0" % first, b"%d-0" % last) for first, last in ranges]
            commands.append(self._check(owned))
        replies = iter(self._connection.call(commands))
        found: list[list[Record] | None] = []
        for (owned, offsets), count in zip(wanted, counts, strict=True):
            read = [raise_for_reply(next(replies), self._connection.node.address) for _ in range(count)]
            entries = [entry for reply in read for entry in reply]
            found.append(_chosen(owned, records_of(entries), offsets) if self._ours(owned, next(replies)) else None)
        return found


def _ranges(offsets: list[int]) -> list[OffsetRange]:
    ranges = as_ranges(offsets)
    scattered = len(ranges) > RANGES and offsets[-1] - offsets[0] < SCAN * len(offsets)
    return [(offsets[0], offsets[-1])] if scattered else ranges


def _chosen(owned: OwnedPartition, records: list[Record], wanted: list[int]) -> list[Record]:
    if len(records) > len(wanted):
        among = set(wanted)
        records = [record for record in records if record.offset in among]
    if len(records) < len(wanted):
        log_missing(owned, wanted[0], wanted[-1], len(wanted) - len(records))
    return records


def log_of(owned: OwnedPartition) -> bytes:
    """Return the key of a partition's stream."""
    return partition_keys(owned.lock_holder.prefix, owned.partition).log
