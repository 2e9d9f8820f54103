"""Publish rates of a topic's partitions, by the offsets that their nodes told this process before."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.inspect.topic_status import TopicPartition
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Node, raise_for_reply
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

TOPICS: Final = 64
"""Remembered at once."""
SHORTEST_S: Final = 1.0
RENEWED_S: Final = 10.0
LONGEST_S: Final = 120.0
"""Older offsets tell nothing of now."""


class Ends(NamedTuple):
    """Offsets behind the last records, at a time of this process."""

    at: float
    of: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class MeasuredTopic:
    """Partitions with sizes and rates. `over_s`: time of the measurement, None where earlier ones stand in.

    `unreachable`: reason per silent node.
    """

    partitions: tuple[TopicPartition, ...]
    nodes: Mapping[NodeId, str]
    over_s: float | None
    unreachable: Mapping[str, str]


@dataclass(slots=True)
class RateMeter:
    """Remembers offsets of topics; safe for threads."""

    _known: OrderedDict[tuple[str, str, int], tuple[Ends, Ends]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def measure(self, runtime: Runtime, topic_id: int) -> MeasuredTopic:
        """Return a topic's partitions; the first time without rates, except those that a job measured."""
        with runtime.control.connection() as connection:
            rows = connection.execute(query("inspected_topic_partitions"), {"topic_id": topic_id}).fetchall()
        partitions = [TopicPartition(*row) for row in rows]
        nodes = {node.node_id: node for node in load_nodes(runtime.control)}
        told: dict[int, tuple[int, int]] = {}
        unreachable: dict[str, str] = {}
        for node_id in dict.fromkeys(one.node for one in partitions):
            try:
                told |= _told(runtime, nodes[node_id], [one.partition for one in partitions if one.node == node_id])
            except MqlayerError as error:
                unreachable[nodes[node_id].name] = str(error)
        now = Ends(time.monotonic(), {partition: past for partition, (past, _) in told.items()})
        before = self._before((runtime.control.address, runtime.prefix, topic_id), now)
        over_s = None if before is None else now.at - before.at
        measured = tuple(_measured(one, told.get(one.partition), before, over_s) for one in partitions)
        return MeasuredTopic(measured, {node_id: node.name for node_id, node in nodes.items()}, over_s, unreachable)

    def _before(self, name: tuple[str, str, int], now: Ends) -> Ends | None:
        with self._lock:
            older, newer = self._known.pop(name, (now, now))
            if now.at - newer.at >= RENEWED_S:
                older, newer = newer, now
            self._known[name] = older, newer
            while len(self._known) > TOPICS:
                self._known.popitem(last=False)
        return older if SHORTEST_S <= now.at - older.at <= LONGEST_S else None


def _told(runtime: Runtime, node: Node, partitions: list[int]) -> dict[int, tuple[int, int]]:
    keys = [partition_keys(runtime.prefix, partition) for partition in partitions]
    with runtime.connection(node) as connection:
        replies = connection.call([("HMGET", key.meta, "next", "first") for key in keys])
    pairs = [raise_for_reply(reply, node.address) for reply in replies]
    return {
        partition: (int(past), int(first or 1))
        for partition, (past, first) in zip(partitions, pairs, strict=True)
        if past is not None
    }


def _measured(
    one: TopicPartition, told: tuple[int, int] | None, before: Ends | None, over_s: float | None
) -> TopicPartition:
    if told is None:
        return one
    past, first = told
    per_s = one.per_s
    if before is not None and over_s is not None and one.partition in before.of:
        per_s = max(0, past - before.of[one.partition]) / over_s
    return TopicPartition(
        one.partition, one.lp_from, one.lp_to, one.node, one.state, per_s, records=past - first, published=past - 1
    )
