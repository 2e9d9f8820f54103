"""Read routes: ranges of a version, history, drain progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from mqlayer.domain.names import check_name
from mqlayer.errors import NotFound
from mqlayer.groups.positions import GroupPartition, read_positions
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.runtime.route_cache import load_nodes, load_route, node_names
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
    """A route change, and when it reached each state. `mode`: live, unreachable or lost, by the parents' node."""

    change_id: int
    version: int
    kind: str
    state: str
    mode: str
    actor: str
    planned_at: datetime
    sealed_at: datetime | None
    opened_at: datetime | None
    ended_at: datetime | None
    parents: Sequence[int]
    successors: Sequence[int]


@dataclass(frozen=True, slots=True)
class ListedChange(RouteChange):
    """A route change of any topic. `kept`: parents that are not deleted yet; `waits`: groups that have not drained
    them."""

    topic: str
    kept: int
    waits: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.state in ("planned", "sealing", "sealed")


@dataclass(frozen=True, slots=True)
class ChangedPartition:
    """A partition that a change ends (`is_parent`) or makes."""

    partition: int
    node: str
    lp_from: int
    lp_to: int
    state: str
    is_parent: bool


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """Unsettled messages in a sealed partition; None: its node is unavailable."""

    group: str
    group_version: int
    partition: int
    remaining: int | None


def route_ranges(database: Database, topic: str, version: int | None = None) -> list[RouteRange]:
    """Return the ranges of a route version, default the one in force. Raises NotFound."""
    names = node_names(database)
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


def list_changes(
    database: Database,
    *,
    topic: str | None = None,
    change_id: int | None = None,
    which: Literal["all", "open", "draining"] = "all",
    before: int | None = None,
    limit: int = 50,
) -> list[ListedChange]:
    """Return route changes of all topics or of one, newest first, from before one on.

    *draining*: done, and a parent is still kept for a group or the archive.
    """
    facts = {
        "topic": topic, "change_id": change_id, "open": which == "open", "draining": which == "draining",
        "before": before, "limit": limit,
    }  # fmt: skip
    with database.connection() as connection:
        changes = [ListedChange(*row) for row in connection.execute(query("change_list"), facts, prepare=False)]
        ids = {"change_ids": [one.change_id for one in changes if one.kept]}
        waits: dict[int, dict[str, int]] = {}
        for number, group, parents in connection.execute(query("change_waits"), ids).fetchall():
            waits.setdefault(number, {})[group] = parents
    return [replace(one, waits=waits.get(one.change_id, {})) for one in changes]


def find_change(database: Database, change_id: int) -> ListedChange:
    """Return a route change. Raises NotFound."""
    for one in list_changes(database, change_id=change_id):
        return one
    raise NotFound("route change", change_id, "see those of a topic: mqlayer route history TOPIC")


def change_states(database: Database, change_ids: Sequence[int]) -> dict[int, str]:
    """Return the states of route changes by number."""
    with database.connection() as connection:
        return dict(connection.execute(query("change_states"), {"change_ids": list(change_ids)}).fetchall())


def changed_partitions(database: Database, change_id: int) -> list[ChangedPartition]:
    """Return the partitions that a change ends, then those that it makes."""
    with database.connection() as connection:
        rows = connection.execute(query("change_parts"), {"change_id": change_id}).fetchall()
    return [ChangedPartition(*row) for row in rows]


def drain_progress(runtime: Runtime, topic: str, partitions: Sequence[int] | None = None) -> list[DrainProgress]:
    """Return groups' unsettled messages in undrained sealed partitions, all of them or these."""
    facts = {"topic": check_name("topic", topic), "partitions": None if partitions is None else list(partitions)}
    with runtime.control.connection() as connection:
        rows = connection.execute(query("drain_progress"), facts).fetchall()
    group_partitions = [GroupPartition(row[4], row[3], row[0], start=row[6], seek=row[7]) for row in rows]
    positions = read_positions(runtime, load_nodes(runtime.control), group_partitions)
    found = []
    for group_id, group, version, partition, _, next_offset, _, _ in rows:
        position = positions.at(partition, group_id)
        left = None if position is None else max(0, next_offset - position.position - position.settled)
        found.append(DrainProgress(group, version, partition, left))
    return found
