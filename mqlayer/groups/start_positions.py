"""Where a new group begins in each partition that there is.

`earliest`: at the first record kept, along the whole lineage. `latest`: behind the last record of the partitions in
force. A time: at the first record of that time or later, by the publishers' clocks; found by bisection, so where those
clocks differ it may be some records off, never out of order. What lies behind a group's start counts as drained; a
partition with a parent that is not drained begins with its first record.

An offset is a position, never an identity: a node that falls back gives it out again, and what is made anew elsewhere
begins at 1. So beginnings are stored only where the nodes are those that were asked, and were not armed since; whoever
arms one later corrects what is stored.
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
from mqlayer.runtime.route_cache import RouteCache

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
    """Where a group begins in a partition; `drained`: behind all of it."""

    partition: int
    offset: int
    drained: bool


def undeleted_partitions(connection: Connection, topic_id: int) -> list[UndeletedPartition]:
    """Return the partitions of a topic that a group can begin in, parents before successors.

    A successor that is not open yet is not among them: every group begins it with its first record.
    """
    return [
        UndeletedPartition(*row)
        for row in connection.execute(query("partitions_kept"), {"topic_id": topic_id}).fetchall()
    ]


def still_hold(
    connection: Connection, partitions: Sequence[UndeletedPartition], beginnings: Sequence[StartPosition]
) -> bool:
    """Say whether beginnings are still where they were found, and keep it so until the caller's transaction ends."""
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
    """Return where a group begins in each partition behind what the archive gives it, and what it must not give.

    `progress`: per partition the first offset that is not archived, and whether all of it is. A partition of which the
    group reads a parent is read as a whole: its bound is 1, the first offset that the archive must leave out. Those
    without a bound are given as far as they are archived.
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
    """Return those of some partitions that a partition took LPs over from."""
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
    """Finds the beginnings of one group. `partitions` come parents first."""

    def __init__(
        self, routes: RouteCache, partitions: Sequence[UndeletedPartition], *, prefix: str, unsafe: bool
    ) -> None:
        self._routes, self._partitions, self._prefix, self._unsafe = routes, partitions, prefix, unsafe

    def of(self, start: Start) -> list[StartPosition]:
        """Return the beginning in each partition. Raises StoreUnavailable, also where only one node is away."""
        if start == "earliest":
            return [StartPosition(partition.partition, 1, drained=False) for partition in self._partitions]
        found: dict[int, StartPosition] = {}
        connections: dict[NodeId, NodeConnection] = {}
        try:
            for partition in self._partitions:
                if any(not found[parent.partition].drained for parent in parents_of(partition, self._partitions)):
                    found[partition.partition] = StartPosition(partition.partition, 1, drained=False)
                    continue
                connection = connections.get(partition.node)
                if connection is None:
                    node = self._routes.node(partition.node)
                    connection = connections[partition.node] = NodeConnection(node, unsafe=self._unsafe)
                found[partition.partition] = self._in_partition(connection, partition, start)
        finally:
            for connection in connections.values():
                connection.close()
        return list(found.values())

    def _in_partition(self, connection: NodeConnection, partition: UndeletedPartition, start: Start) -> StartPosition:
        meta = self._ask(
            connection, "HMGET", partition_keys(self._prefix, partition.partition).meta, "state", "next", "first"
        )
        if meta[0] == b"deleted":
            return StartPosition(partition.partition, 1, drained=True)
        if meta[0] is None:
            # A missing partition means "refuse", never "new": it may hold what the group must not see.
            raise NodeNotArmed(
                connection.node.address, f"partition {partition.partition} is gone from it: the node lost data"
            )
        end, first = int(meta[1]), int(meta[2])
        offset = end
        if isinstance(start, datetime):
            offset = self._first_since(connection, partition.partition, int(start.timestamp() * 1000), first, end)
        return StartPosition(partition.partition, offset, drained=partition.sealed and offset >= end)

    def _first_since(self, connection: NodeConnection, partition: int, at_ms: int, first: int, end: int) -> int:
        """Return the first offset whose record is of that time or later, by bisection; the end where none is."""
        key = partition_keys(self._prefix, partition).log
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
