"""Archives' status, for people and gauges only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from mqlayer.domain.message import Record, records_of
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Node, raise_for_reply
from mqlayer.redis.read_scripts import position_command, position_reply
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime


@dataclass(slots=True)
class ArchiveStatus:
    """A topic's archive: the page 'Archive: status, outcomes, snapshot columns'.

    `retained`: messages that only archiving keeps in streams; `retained_bytes`: estimated. `stream_bytes`: None if a
    node forbids MEMORY. `gaps`: those that stop partitions. `unreachable`: nodes that the counts omit, with the reason.
    """

    topic: str
    archived: bool
    batch: int
    records: int
    gaps: int
    last_pass_at: datetime | None
    first_day: str | None
    last_day: str | None
    outcomes_dropped: int
    lag: int = 0
    lag_s: float = 0.0
    retained: int = 0
    retained_bytes: int = 0
    stream_bytes: int | None = 0
    unreachable: dict[str, str] = field(default_factory=dict)


class _ArchivePosition(NamedTuple):
    topic_id: int
    partition: int
    node: NodeId
    upto: int | None
    groups: list[tuple[int, int, int]]


def archive_status(runtime: Runtime, *, topic: str | None = None) -> list[ArchiveStatus]:
    """Return the status of topics ever archived, or of one."""
    with runtime.control.connection() as connection:
        rows = connection.execute(query("archive_statuses"), {"topic": topic}).fetchall()
        found = {topic_id: ArchiveStatus(*facts) for topic_id, *facts in rows}
        facts = {"topic_ids": list(found)}
        positions = [
            _ArchivePosition(topic_id, partition, NodeId(node), upto, list(zip(groups, seeks, starts, strict=True)))
            for topic_id, partition, node, upto, groups, seeks, starts in connection.execute(
                query("archive_positions"), facts
            )
        ]
    by_node: dict[NodeId, list[_ArchivePosition]] = {}
    for position in positions:
        by_node.setdefault(position.node, []).append(position)
    nodes = {node.node_id: node for node in load_nodes(runtime.control)}
    for node_id, wanted in by_node.items():
        try:
            _ask(runtime, nodes[node_id], wanted, found)
        except MqlayerError as error:
            for topic_id in {position.topic_id for position in wanted}:
                found[topic_id].unreachable[nodes[node_id].name] = str(error)
    return list(found.values())


def _ask(runtime: Runtime, node: Node, positions: Iterable[_ArchivePosition], found: dict[int, ArchiveStatus]) -> None:
    with runtime.connection(node) as connection:
        for position in positions:
            keys = partition_keys(runtime.prefix, position.partition)
            since = b"%d-0" % (position.upto or 1)
            commands: list[Any] = [
                ("TIME",), ("HMGET", keys.meta, "next", "first"), ("MEMORY", "USAGE", keys.log),
                ("XRANGE", keys.log, since, "+", "COUNT", 1),
            ]  # fmt: skip
            commands += [
                position_command(connection, runtime.prefix, position.partition, group, start=start, seek=seek)
                for group, seek, start in position.groups
            ]
            _count(position, connection.call(commands), found[position.topic_id], node.address)


def _count(position: _ArchivePosition, replies: list[Any], status: ArchiveStatus, address: str) -> None:
    now, meta, size, oldest, *group_positions = replies
    # Managed servers may forbid MEMORY: the size is then unknown.
    size = None if isinstance(size, Exception) else int(size or 0)
    status.stream_bytes = None if size is None or status.stream_bytes is None else status.stream_bytes + size
    following, first = (int(text or 1) for text in raise_for_reply(meta, address))
    if position.upto is None:
        return
    status.lag += max(0, following - position.upto)
    seconds, micros = map(int, raise_for_reply(now, address))
    for record in _messages(raise_for_reply(oldest, address)):
        status.lag_s = max(status.lag_s, round(seconds + micros / 1e6 - record.at_ms / 1000, 3))
    positions = [
        group_position.position
        for group_position in (position_reply(reply, address) for reply in group_positions)
        if group_position is not None
    ]
    if positions:
        retained = max(0, min(*positions, following) - max(position.upto, first))
        status.retained += retained
        status.retained_bytes += round((size or 0) * retained / max(1, following - first))


def _messages(entries: list[Any]) -> list[Record]:
    return [record for record in records_of(entries) if record.m != b"command"]
