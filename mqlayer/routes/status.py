"""Read routes: ranges of a version, history, drain progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from mqlayer.domain.names import check_name
from mqlayer.errors import NotFound
from mqlayer.groups.positions import GroupPartition, read_positions
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.runtime.route_cache import load_nodes, load_route
from mqlayer.runtime.runtime import Runtime


@dataclass(frozen=True, slots=True)
class RouteRange:
    """A range of a route version; `parents`: partitions it came from."""

    version: int
    lp_from: int
    lp_to: int
    partition: int
    node: str
    state: str
    parents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RouteChange:
    """A route change, and when it reached each state."""

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
    """Unsettled messages in a sealed partition; None: its node is unavailable."""

    group: str
    group_version: int
    partition: int
    remaining: int | None


def route_ranges(database: Database, topic: str, version: int | None = None) -> list[RouteRange]:
    """Return the ranges of a route version, default the one in force. Raises NotFound."""
    names = {node.node_id: node.name for node in load_nodes(database)}
    facts = {"topic": check_name("topic", topic), "version": version}
    with database.connection() as connection:
        rows = connection.execute(query("route_of_version"), facts).fetchall()
    if not rows:
        newest = load_route(database, topic).version
        raise NotFound("route version", version, f"topic {topic!r} has 1 to {newest}")
    return [
        RouteRange(found, lp_from, lp_to, partition, names[node_id], state, tuple(parents))
        for found, lp_from, lp_to, partition, node_id, state, parents in rows
    ]


def route_history(database: Database, topic: str) -> list[RouteChange]:
    """Return a topic's route changes, oldest first. Raises NotFound."""
    with database.connection() as connection:
        rows = connection.execute(query("change_history"), {"topic": check_name("topic", topic)}).fetchall()
    if not rows:
        load_route(database, topic)
    return [RouteChange(*row) for row in rows]


def drain_progress(runtime: Runtime, topic: str) -> list[DrainProgress]:
    """Return groups' unsettled messages in undrained sealed partitions."""
    with runtime.control.connection() as connection:
        rows = connection.execute(query("drain_progress"), {"topic": check_name("topic", topic)}).fetchall()
    group_partitions = [GroupPartition(row[4], row[3], row[0], start=row[6], seek=row[7]) for row in rows]
    positions = read_positions(runtime, load_nodes(runtime.control), group_partitions)
    found = []
    for group_id, group, version, partition, _, next_offset, _, _ in rows:
        position = positions.at(partition, group_id)
        left = None if position is None else max(0, next_offset - position.position - position.settled)
        found.append(DrainProgress(group, version, partition, left))
    return found
