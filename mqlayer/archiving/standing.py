"""Where the archive of each topic is, and what streams keep for it alone: for people and gauges, not for decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from mqlayer.domain.message import Record, records_of
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.looking import look_command, look_reply
from mqlayer.redis.nodes import Node, NodeConnection, raise_for_reply
from mqlayer.routes.cache import load_nodes


@dataclass(slots=True)
class ArchiveStanding:
    """A topic's archive.

    `lag`: messages in its streams that are not archived; `lag_s`: the age of the oldest of them, by the publisher's
    clock against the node's. `held`: messages that every group has settled and that are kept for the archive alone, and
    `held_bytes` what their part of the streams takes, about. `stream_bytes`: all that the topic's streams take in
    Redis; None where a node does not tell. `gaps`: that partitions wait at. `days`: oldest and newest day with records.
    `outcomes_dropped`: offsets of which nodes dropped what became of them, ever, for lack of an archiver.
    `away`: nodes that could not be asked, with the reason; the counts leave them out.
    """

    topic: str
    archived: bool
    batch: int
    records: int
    gaps: int
    passed_at: datetime | None
    first_day: str | None
    last_day: str | None
    outcomes_dropped: int
    lag: int = 0
    lag_s: float = 0.0
    held: int = 0
    held_bytes: int = 0
    stream_bytes: int | None = 0
    away: dict[str, str] = field(default_factory=dict)


class _Spot(NamedTuple):
    """A partition, its first offset that is not archived (None: it is complete), and the groups that count there."""

    topic_id: int
    partition: int
    node: NodeId
    upto: int | None
    groups: list[tuple[int, int, int]]


def archive_status(
    database: Database, *, prefix: str, topic: str | None = None, unsafe: bool = False
) -> list[ArchiveStanding]:
    """Return where the archive of each topic is that is archived, or was; of one topic, or of all."""
    with database.connection() as connection:
        rows = connection.execute(query("archive_standings"), {"topic": topic}).fetchall()
        found = {topic_id: ArchiveStanding(*facts) for topic_id, *facts in rows}
        facts = {"topic_ids": list(found)}
        spots = [
            _Spot(topic_id, partition, NodeId(node), upto, list(zip(groups, seeks, starts, strict=True)))
            for topic_id, partition, node, upto, groups, seeks, starts in connection.execute(
                query("archive_spots"), facts
            )
        ]
    by_node: dict[NodeId, list[_Spot]] = {}
    for spot in spots:
        by_node.setdefault(spot.node, []).append(spot)
    nodes = {node.node_id: node for node in load_nodes(database)}
    for node_id, wanted in by_node.items():
        try:
            _ask(nodes[node_id], wanted, found, prefix=prefix, unsafe=unsafe)
        except MqlayerError as error:
            for topic_id in {spot.topic_id for spot in wanted}:
                found[topic_id].away[nodes[node_id].name] = str(error)
    return list(found.values())


def _ask(node: Node, spots: Iterable[_Spot], found: dict[int, ArchiveStanding], *, prefix: str, unsafe: bool) -> None:
    with NodeConnection(node, unsafe=unsafe) as line:
        for spot in spots:
            keys = partition_keys(prefix, spot.partition)
            since = b"%d-0" % (spot.upto or 1)
            commands: list[Any] = [
                ("TIME",), ("HMGET", keys.meta, "next", "first"), ("MEMORY", "USAGE", keys.log),
                ("XRANGE", keys.log, since, "+", "COUNT", 1),
            ]  # fmt: skip
            commands += [
                look_command(line, prefix, spot.partition, group, start=start, seek=seek)
                for group, seek, start in spot.groups
            ]
            _count(spot, line.call(commands), found[spot.topic_id], node.address)


def _count(spot: _Spot, replies: list[Any], standing: ArchiveStanding, address: str) -> None:
    now, meta, size, oldest, *looks = replies
    # Managed servers may forbid MEMORY: what can't be asked is not known.
    size = None if isinstance(size, Exception) else int(size or 0)
    standing.stream_bytes = None if size is None or standing.stream_bytes is None else standing.stream_bytes + size
    following, first = (int(text or 1) for text in raise_for_reply(meta, address))
    if spot.upto is None:
        return
    standing.lag += max(0, following - spot.upto)
    seconds, micros = map(int, raise_for_reply(now, address))
    for record in _messages(raise_for_reply(oldest, address)):
        standing.lag_s = max(standing.lag_s, round(seconds + micros / 1e6 - record.at_ms / 1000, 3))
    positions = [look.position for look in (look_reply(reply, address) for reply in looks) if look is not None]
    if positions:
        held = max(0, min(*positions, following) - max(spot.upto, first))
        standing.held += held
        standing.held_bytes += round((size or 0) * held / max(1, following - first))


def _messages(entries: list[Any]) -> list[Record]:
    return [record for record in records_of(entries) if record.m != b"command"]
