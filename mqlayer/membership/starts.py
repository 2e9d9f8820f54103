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
from mqlayer.redis.nodes import NodeConnection, raise_for_reply
from mqlayer.routes.cache import RouteCache

Start = Literal["earliest", "latest"] | datetime


@dataclass(frozen=True, slots=True)
class Kept:
    """A partition that is not deleted."""

    partition: int
    node: NodeId
    armed_at: datetime | None
    lp_from: int
    lp_to: int
    sealed: bool
    born_in: int | None
    ended_in: int | None


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a group begins in a partition; `drained`: behind all of it."""

    partition: int
    offset: int
    drained: bool


def kept_partitions(connection: Connection, topic_id: int) -> list[Kept]:
    """Return the partitions of a topic that a group can begin in, parents before successors.

    A successor that is not open yet is not among them: every group begins it with its first record.
    """
    return [Kept(*row) for row in connection.execute(query("partitions_kept"), {"topic_id": topic_id}).fetchall()]


def still_hold(connection: Connection, partitions: Sequence[Kept], beginnings: Sequence[Beginning]) -> bool:
    """Say whether beginnings are still where they were found, and keep it so until the caller's transaction ends."""
    found = {
        kept.partition: (kept.node, kept.armed_at)
        for kept, beginning in zip(partitions, beginnings, strict=True)
        if beginning.offset > 1
    }
    rows = connection.execute(query("partitions_hold"), {"partitions": list(found)}).fetchall() if found else []
    now = {partition: found[partition] if deleted else (node, at) for partition, node, at, deleted in rows}
    return now == found


def behind_archive(
    partitions: Sequence[Kept], beginnings: Sequence[Beginning], progress: Mapping[int, tuple[int, bool]]
) -> tuple[list[Beginning], dict[str, int]]:
    """Return where a group begins in each partition behind what the archive gives it, and what it must not give.

    `progress`: per partition the first offset that is not archived, and whether all of it is. A partition of which the
    group reads a parent is read as a whole: its bound is 1, the first offset that the archive must leave out. Those
    without a bound are given as far as they are archived.
    """
    found: dict[int, Beginning] = {}
    bounds: dict[str, int] = {}
    for kept, own in zip(partitions, beginnings, strict=True):
        upto, complete = progress.get(kept.partition, (1, False))
        if any(not found[parent.partition].drained for parent in parents_of(kept, partitions)):
            found[kept.partition] = Beginning(kept.partition, 1, drained=False)
            bounds[str(kept.partition)] = 1
        else:
            drained = own.drained or (kept.sealed and complete)
            found[kept.partition] = Beginning(kept.partition, max(own.offset, upto), drained=drained)
    return list(found.values()), bounds


def parents_of(kept: Kept, partitions: Sequence[Kept]) -> list[Kept]:
    """Return those of some partitions that a partition took LPs over from."""
    if kept.born_in is None:
        return []
    return [
        other
        for other in partitions
        if other.ended_in == kept.born_in and other.lp_from < kept.lp_to and kept.lp_from < other.lp_to
    ]


class Beginnings:
    """Finds the beginnings of one group. `partitions` come parents first."""

    def __init__(self, routes: RouteCache, partitions: Sequence[Kept], *, prefix: str, unsafe: bool) -> None:
        self._routes, self._partitions, self._prefix, self._unsafe = routes, partitions, prefix, unsafe

    def of(self, start: Start) -> list[Beginning]:
        """Return the beginning in each partition. Raises StoreUnavailable, also where only one node is away."""
        if start == "earliest":
            return [Beginning(kept.partition, 1, drained=False) for kept in self._partitions]
        found: dict[int, Beginning] = {}
        lines: dict[NodeId, NodeConnection] = {}
        try:
            for kept in self._partitions:
                if any(not found[parent.partition].drained for parent in parents_of(kept, self._partitions)):
                    found[kept.partition] = Beginning(kept.partition, 1, drained=False)
                    continue
                line = lines.get(kept.node)
                if line is None:
                    node = self._routes.node(kept.node)
                    line = lines[kept.node] = NodeConnection(node, unsafe=self._unsafe)
                found[kept.partition] = self._in_partition(line, kept, start)
        finally:
            for line in lines.values():
                line.close()
        return list(found.values())

    def _in_partition(self, line: NodeConnection, kept: Kept, start: Start) -> Beginning:
        meta = self._ask(line, "HMGET", partition_keys(self._prefix, kept.partition).meta, "state", "next", "first")
        if meta[0] == b"deleted":
            return Beginning(kept.partition, 1, drained=True)
        if meta[0] is None:
            # A missing partition means "refuse", never "new": it may hold what the group must not see.
            raise NodeNotArmed(line.node.address, f"partition {kept.partition} is gone from it: the node lost data")
        end, first = int(meta[1]), int(meta[2])
        offset = end
        if isinstance(start, datetime):
            offset = self._first_since(line, kept.partition, int(start.timestamp() * 1000), first, end)
        return Beginning(kept.partition, offset, drained=kept.sealed and offset >= end)

    def _first_since(self, line: NodeConnection, partition: int, at_ms: int, first: int, end: int) -> int:
        """Return the first offset whose record is of that time or later, by bisection; the end where none is."""
        key = partition_keys(self._prefix, partition).log
        low, high = first, end
        while low < high:
            middle = (low + high) // 2
            entries = self._ask(line, "XRANGE", key, b"%d-0" % middle, b"%d-0" % (end - 1), "COUNT", 1)
            if entries and int(entries[0][1][1].split(b":", 4)[3]) < at_ms:
                low = middle + 1
            else:
                high = middle
        return low

    def _ask(self, line: NodeConnection, *command: Any) -> Any:
        return raise_for_reply(line.call([command])[0], line.node.address)
