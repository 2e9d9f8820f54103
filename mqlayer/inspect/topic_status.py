"""A topic: its limits, partitions with their sizes and rates, and groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from mqlayer.domain.names import check_any_topic
from mqlayer.domain.retention import RETENTION_FIELDS, Retention
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, NotFound
from mqlayer.inspect.group_status import GroupStatus, group_statuses
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import raise_for_reply
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime


@dataclass(frozen=True, slots=True)
class TopicPartition:
    """A partition. `per_s`: messages published a second, where a group balances by rate. `records`, `bytes`: kept in
    Redis, None where its node does not tell."""

    partition: int
    lp_from: int
    lp_to: int
    node: NodeId
    state: str
    per_s: float | None
    records: int | None = None
    published: int | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TopicStatus:
    """A topic. `unreachable`: reason per silent node."""

    topic: str
    strategy: str
    version: int | None
    body_limit: int
    backlog_limit: int
    archived: bool
    retention_days: int | None
    paused_at: datetime | None
    paused_by: str | None
    created_at: datetime
    durability: str
    retention: Retention
    partitions: Sequence[TopicPartition]
    nodes: Mapping[NodeId, str]
    groups: Sequence[GroupStatus]
    unreachable: Mapping[str, str]


def topic_status(runtime: Runtime, name: str) -> TopicStatus:
    """Return a topic as servers tell now. Raises NotFound."""
    check_any_topic(name)
    with runtime.control.connection() as connection:
        row = connection.execute(query("inspected_topic"), {"topic": name}).fetchone()
        if row is None:
            raise NotFound("topic", name, "see those that there are: mqlayer topic list")
        topic_id, *facts = row[:-RETENTION_FIELDS]
        retention = Retention(*row[-RETENTION_FIELDS:])
        rows = connection.execute(query("inspected_topic_partitions"), {"topic_id": topic_id}).fetchall()
    partitions = [TopicPartition(*one) for one in rows]
    nodes = {node.node_id: node for node in load_nodes(runtime.control)}
    unreachable: dict[str, str] = {}
    for node_id in {one.node for one in partitions}:
        try:
            partitions = _asked(runtime, node_id, partitions)
        except MqlayerError as error:
            unreachable[nodes[node_id].name] = str(error)
    # Without a route, its creation was cut off: there are no groups yet.
    groups = [] if facts[2] is None else group_statuses(runtime, name)
    names = {node_id: node.name for node_id, node in nodes.items()}
    values: list[Any] = [*facts, retention, partitions, names, groups, unreachable]
    return TopicStatus(*values)


def _asked(runtime: Runtime, node_id: NodeId, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
    node = next(one for one in load_nodes(runtime.control) if one.node_id == node_id)
    here = [one for one in partitions if one.node == node_id]
    keys = [partition_keys(runtime.prefix, one.partition) for one in here]
    commands = [("HMGET", key.meta, "next", "first") for key in keys]
    with runtime.connection(node, RedisRole.VIEWER) as connection:
        replies = connection.call([*commands, *(("MEMORY", "USAGE", key.log) for key in keys)])
    told = dict.fromkeys(partitions)
    for one, meta, size in zip(here, replies, replies[len(here) :], strict=False):
        following, first = (int(text or 1) for text in raise_for_reply(meta, node.address))
        # Managed servers may forbid MEMORY.
        known = None if isinstance(size, Exception) else int(size or 0)
        told[one] = replace(one, records=following - first, published=following - 1, bytes=known)
    return [told[one] or one for one in partitions]
