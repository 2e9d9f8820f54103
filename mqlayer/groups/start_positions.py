"""Start positions of a group in each partition.

`earliest`: the first record kept in the lineage. `latest`: behind the last record. A time: the first record of that
publish time or later; publishers' clocks may make it some records off. A partition with an undrained parent starts at
its first record.

Stored only if no asked node was armed since: it may reuse offsets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from mqlayer.domain.routing import NodeId
from mqlayer.errors import NodeNotArmed
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection, raise_for_reply
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime

Start = Literal["earliest", "latest"] | datetime


@dataclass(frozen=True, slots=True)
class UndeletedPartition:
    """A partition that is not deleted."""

    partition: int
    node: NodeId
    armed_at: datetime | None
    lp_from: int
    lp_to: int
    sealed: bool
    created_by_change: int | None
    ended_by_change: int | None


@dataclass(frozen=True, slots=True)
class StartPosition:
    """A start in a partition; `drained`: behind all of it."""

    partition: int
    offset: int
    drained: bool


def undeleted_partitions(connection: Connection, topic_id: int) -> list[UndeletedPartition]:
    """Return a topic's partitions, parents first, without unopened successors."""
    return [
        UndeletedPartition(*row)
        for row in connection.execute(query("partitions_kept"), {"topic_id": topic_id}).fetchall()
    ]


def still_hold(
    connection: Connection, partitions: Sequence[UndeletedPartition], beginnings: Sequence[StartPosition]
) -> bool:
    """Whether the positions' nodes are unchanged; lock them."""
    found = {
        partition.partition: (partition.node, partition.armed_at)
        for partition, beginning in zip(partitions, beginnings, strict=True)
        if beginning.offset > 1
    }
    rows = connection.execute(query("partitions_hold"), {"partitions": list(found)}).fetchall() if found else []
    now = {partition: found[partition] if deleted else (node, at) for partition, node, at, deleted in rows}
    return now == found


def behind_archive(
    partitions: Sequence[UndeletedPartition],
    beginnings: Sequence[StartPosition],
    progress: Mapping[int, tuple[int, bool]],
) -> tuple[list[StartPosition], dict[str, int]]:
    """Return starts behind the archive, and per partition the first offset that a backfill must not give.

    `progress`: per partition the first unarchived offset, and whether all is archived. A partition with an undrained
    parent has start and bound 1. Without bound, all archived records are given.
    """
    found: dict[int, StartPosition] = {}
    bounds: dict[str, int] = {}
    for partition, own in zip(partitions, beginnings, strict=True):
        upto, complete = progress.get(partition.partition, (1, False))
        if any(not found[parent.partition].drained for parent in parents_of(partition, partitions)):
            found[partition.partition] = StartPosition(partition.partition, 1, drained=False)
            bounds[str(partition.partition)] = 1
        else:
            drained = own.drained or (partition.sealed and complete)
            found[partition.partition] = StartPosition(partition.partition, max(own.offset, upto), drained=drained)
    return list(found.values()), bounds


def parents_of(partition: UndeletedPartition, partitions: Sequence[UndeletedPartition]) -> list[UndeletedPartition]:
    """Return the partitions from which a partition took LPs."""
    if partition.created_by_change is None:
        return []
    return [
        other
        for other in partitions
        if other.ended_by_change == partition.created_by_change
        and other.lp_from < partition.lp_to
        and partition.lp_from < other.lp_to
    ]


class StartFinder:
    """Finds start positions; `partitions` come parents first."""

    def __init__(self, runtime: Runtime, routes: RouteCache, partitions: Sequence[UndeletedPartition]) -> None:
        self._runtime, self._routes, self._partitions = runtime, routes, partitions

    def of(self, start: Start) -> list[StartPosition]:
        """Return a start per partition. Raises StoreUnavailable, also for one unavailable node."""
        if start == "earliest":
            return [StartPosition(partition.partition, 1, drained=False) for partition in self._partitions]
        found: dict[int, StartPosition] = {}
        with NodePool(self._runtime, self._routes.node) as connections:
            for partition in self._partitions:
                if any(not found[parent.partition].drained for parent in parents_of(partition, self._partitions)):
                    found[partition.partition] = StartPosition(partition.partition, 1, drained=False)
                    continue
                found[partition.partition] = self._in_partition(connections.to(partition.node), partition, start)
        return list(found.values())

    def ends(self) -> dict[int, int]:
        """Return the offset behind each partition's last record; 1 for a deleted one. Raises StoreUnavailable."""
        with NodePool(self._runtime, self._routes.node) as connections:
            found = {one.partition: self._meta(connections.to(one.node), one.partition) for one in self._partitions}
        return {partition: int(meta[1] or 1) for partition, meta in found.items()}

    def _meta(self, connection: NodeConnection, partition: int) -> Any:
        key = partition_keys(self._runtime.prefix, partition).meta
        return self._ask(connection, "HMGET", key, "state", "next", "first")

    def _in_partition(self, connection: NodeConnection, partition: UndeletedPartition, start: Start) -> StartPosition:
        meta = self._meta(connection, partition.partition)
        if meta[0] == b"deleted":
            return StartPosition(partition.partition, 1, drained=True)
        if meta[0] is None:
            # A missing partition means "refuse", never "new".
            raise NodeNotArmed(
                connection.node.address, f"partition {partition.partition} is gone from it: the node lost data"
            )
        end, first = int(meta[1]), int(meta[2])
        offset = end
        if isinstance(start, datetime):
            offset = self._first_since(connection, partition.partition, int(start.timestamp() * 1000), first, end)
        return StartPosition(partition.partition, offset, drained=partition.sealed and offset >= end)

    def _first_since(self, connection: NodeConnection, partition: int, at_ms: int, first: int, end: int) -> int:
        key = partition_keys(self._runtime.prefix, partition).log
        low, high = first, end
        while low < high:
            middle = (low + high) // 2
            entries = self._ask(connection, "XRANGE", key, b"%d-0" % middle, b"%d-0" % (end - 1), "COUNT", 1)
            if entries and int(entries[0][1][1].split(b":", 4)[3]) < at_ms:
                low = middle + 1
            else:
                high = middle
        return low

    def _ask(self, connection: NodeConnection, *command: Any) -> Any:
        return raise_for_reply(connection.call([command])[0], connection.node.address)
