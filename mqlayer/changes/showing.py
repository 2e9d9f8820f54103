"""What people ask of routes: the ranges of a version, the changes so far, and how far groups have drained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from mqlayer.domain.names import check_name
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, NotFound
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import group_keys, partition_keys
from mqlayer.redis.nodes import Command, NodeConnection, raise_for_reply
from mqlayer.routes.cache import load_nodes, load_route


@dataclass(frozen=True, slots=True)
class RouteLine:
    """One range of a route version: who serves it, where, and from which partitions it came."""

    version: int
    lp_from: int
    lp_to: int
    partition: int
    node: str
    state: str
    parents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a topic's route, and when it came to each state."""

    change_id: int
    version: int
    kind: str
    state: str
    actor: str
    planned_at: datetime
    sealed_at: datetime | None
    opened_at: datetime | None
    ended_at: datetime | None
    parents: Sequence[int]
    successors: Sequence[int]


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """What a group has yet to settle of a sealed partition; `left` is None where its node can't be asked."""

    group: str
    group_version: int
    partition: int
    left: int | None


def route_lines(database: Database, topic: str, version: int | None = None) -> list[RouteLine]:
    """Return the ranges of a route version of a topic, the one in force by default. Raises NotFound."""
    names = {node.node_id: node.name for node in load_nodes(database)}
    facts = {"topic": check_name("topic", topic), "version": version}
    with database.connection() as connection:
        rows = connection.execute(query("route_of_version"), facts).fetchall()
    if not rows:
        newest = load_route(database, topic).version
        raise NotFound("route version", version, f"topic {topic!r} has 1 to {newest}")
    return [
        RouteLine(found, lp_from, lp_to, partition, names[node_id], state, tuple(parents))
        for found, lp_from, lp_to, partition, node_id, state, parents in rows
    ]


def route_history(database: Database, topic: str) -> list[Change]:
    """Return the changes of a topic's route, oldest first. Raises NotFound."""
    with database.connection() as connection:
        rows = connection.execute(query("change_history"), {"topic": check_name("topic", topic)}).fetchall()
    if not rows:
        load_route(database, topic)
    return [Change(*row) for row in rows]


def drain_progress(database: Database, topic: str, *, prefix: str, unsafe: bool = False) -> list[DrainProgress]:
    """Return how much each group has yet to settle of each sealed partition that it has not drained."""
    with database.connection() as connection:
        rows = connection.execute(query("drain_progress"), {"topic": check_name("topic", topic)}).fetchall()
    places = _places(database, ((row[4], row[3], row[0]) for row in rows), prefix=prefix, unsafe=unsafe)
    found = []
    for group_id, group, version, partition, _, next_offset, start, seek in rows:
        at = places.get((partition, group_id))
        left = None if at is None else max(0, next_offset - at.position(start, seek))
        found.append(DrainProgress(group, version, partition, left))
    return found


class _Place(NamedTuple):
    """How far a group is in a partition: 0 where it has not begun; since which seek; and the first offset kept."""

    committed: int
    seek: int
    first: int

    def position(self, start: int, seek: int) -> int:
        """Return the next offset that the group is given, which starts here since its last seek."""
        begun = self.committed and self.seek >= seek
        return self.committed if begun else max(start, self.first)


def _places(
    database: Database, wanted: Iterable[tuple[NodeId, int, int]], *, prefix: str, unsafe: bool
) -> dict[tuple[int, int], _Place]:
    """Return the place per partition and group; nothing of a node that is away."""
    by_node: dict[NodeId, list[tuple[int, int]]] = {}
    for node_id, partition, group_id in wanted:
        by_node.setdefault(node_id, []).append((partition, group_id))
    nodes = {node.node_id: node for node in load_nodes(database)}
    found: dict[tuple[int, int], _Place] = {}
    for node_id, pairs in by_node.items():
        commands: list[Command] = []
        for partition, group_id in pairs:
            lock, meta = group_keys(prefix, partition, group_id).lock, partition_keys(prefix, partition).meta
            commands += [("HGET", lock, "committed"), ("HGET", lock, "seek"), ("HGET", meta, "first")]
        try:
            with NodeConnection(nodes[node_id], unsafe=unsafe) as line:
                values = iter([int(raise_for_reply(reply, line.node.address) or 0) for reply in line.call(commands)])
        except MqlayerError:
            continue
        found |= dict(zip(pairs, map(_Place, values, values, values), strict=True))
    return found
