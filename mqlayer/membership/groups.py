"""Groups: created once, with the place where they start.

States of a creation: *creating* (the row exists; starting offsets are stored one by one, the first word for a partition
counts) and *live*. A crash between leaves it *creating*; whoever asks for the group next goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mqlayer.domain.backoff import DEFAULT_BACKOFF_S
from mqlayer.domain.names import check_name
from mqlayer.domain.routing import NodeId
from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.nodes import Node, NodeConnection, raise_for_reply
from mqlayer.routes.cache import RouteCache

Start = Literal["earliest", "latest"]


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What a group is created with. `backoff_s`: waits in seconds between attempts, the last one for all further."""

    start: Start = "earliest"
    backoff_s: tuple[float, ...] = DEFAULT_BACKOFF_S


@dataclass(frozen=True, slots=True)
class Group:
    """A group of a topic."""

    group_id: int
    topic_id: int
    topic: str
    name: str
    state: str
    start: Start
    backoff_s: tuple[float, ...]


def find_group(database: Database, topic: str, name: str) -> Group:
    """Return a group. Raises NotFound."""
    with database.connection() as connection:
        row = connection.execute(query("group_find"), {"topic": topic, "name": name}).fetchone()
    if row is None:
        raise NotFound("group", f"{topic}/{name}", "it is created when its first member starts")
    group_id, topic_id, state, start, backoff, _ = row
    return Group(group_id, topic_id, topic, name, state, start, tuple(backoff))


def ensure_group(database: Database, routes: RouteCache, *, topic: str, name: str, prefix: str,
                 settings: GroupSettings, unsafe: bool = False) -> Group:  # fmt: skip
    """Return the group; create it with these settings where it does not exist. Safe to run at once in many processes.

    An existing group keeps its start and its settings. Raises NotFound for an unknown topic, Conflict for a retired
    group.
    """
    check_name("topic", topic)
    check_name("group", name)
    if settings.start not in ("earliest", "latest"):
        raise InvalidInput(f"a group starts at earliest or latest, not {settings.start!r}")
    if not settings.backoff_s or min(settings.backoff_s) < 0:
        raise InvalidInput("the backoff table needs at least one wait of 0 seconds or more")
    routes.route(topic)
    facts = {"topic": topic, "name": name, "start": settings.start, "backoff_s": list(settings.backoff_s)}
    database.transaction(lambda connection: connection.execute(query("group_insert"), facts))
    group = find_group(database, topic, name)
    if group.state == "retired":
        raise Conflict(
            f"group {name!r} of topic {topic!r} is retired", "trimming does not wait for it: use another group"
        )
    if group.state == "creating":
        failpoint("group.after_insert")
        _store_starts(database, routes, group, prefix=prefix, unsafe=unsafe)
    return find_group(database, topic, name)


def _store_starts(database: Database, routes: RouteCache, group: Group, *, prefix: str, unsafe: bool) -> None:
    with database.connection() as connection:
        rows = connection.execute(query("partition_list"), {"topic_id": group.topic_id}).fetchall()
    starts = {partition: 1 for partition, *_ in rows}
    if group.start == "latest":
        by_node: dict[NodeId, list[int]] = {}
        for partition, node_id, *_ in rows:
            by_node.setdefault(node_id, []).append(partition)
        for node_id, partitions in by_node.items():
            starts |= _next_offsets(routes.node(node_id), partitions, prefix=prefix, unsafe=unsafe)
    with database.connection() as connection, connection.transaction():
        for partition, offset in starts.items():
            facts = {"group_id": group.group_id, "partition_id": partition, "start_offset": offset}
            connection.execute(query("group_start_insert"), facts)
        failpoint("group.before_live")
        connection.execute(query("group_live"), {"group_id": group.group_id})


def _next_offsets(node: Node, partitions: list[int], *, prefix: str, unsafe: bool) -> dict[int, int]:
    with NodeConnection(node, unsafe=unsafe) as line:
        replies = line.call([("HGET", partition_keys(prefix, p).meta, "next") for p in partitions])
    return {p: int(raise_for_reply(r, node.address) or 1) for p, r in zip(partitions, replies, strict=True)}
