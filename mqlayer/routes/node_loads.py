"""What partitions cost their nodes: memory and rate, as servers tell now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.errors import MqlayerError
from mqlayer.logs import event_logger
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Node, raise_for_reply
from mqlayer.routes.placement import NodeLoad, PartitionDemand
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)


class PlacedPartition(NamedTuple):
    """A partition that is not deleted. `kept_by_groups`: its topic has groups."""

    partition: PartitionId
    node: NodeId
    state: str
    topic_id: int
    topic: str
    home_zone: str
    lps: int
    per_s: float
    archived: bool
    deleting: bool
    unfinished: bool
    kept_by_groups: bool
    memory: int = 0

    @property
    def load(self) -> PartitionDemand:
        """Its load."""
        return PartitionDemand(self.partition, self.topic_id, self.memory, self.per_s, self.home_zone)


@dataclass(frozen=True, slots=True)
class SystemLoads:
    """The nodes that take partitions and answer, and all partitions."""

    nodes: Sequence[NodeLoad]
    partitions: Sequence[PlacedPartition]

    def on(self, node: NodeId) -> list[PlacedPartition]:
        """Return a node's partitions."""
        return [one for one in self.partitions if one.node == node]


def placed_partitions(runtime: Runtime) -> list[PlacedPartition]:
    """Return all partitions with their rates, as Postgres knows them."""
    with runtime.control.connection() as connection:
        return [PlacedPartition(*row) for row in connection.execute(query("placed_partitions")).fetchall()]


def read_loads(runtime: Runtime) -> SystemLoads:
    """Read the loads of nodes and partitions. Silent nodes take no partitions."""
    partitions: dict[PartitionId, PlacedPartition] = {one.partition: one for one in placed_partitions(runtime)}
    loads: list[NodeLoad] = []
    for node in load_nodes(runtime.control):
        here = [one for one in partitions.values() if one.node == node.node_id]
        try:
            memory, limit, sizes = _asked(runtime, node, here)
        except MqlayerError as error:
            log.warning("node_load_unknown", extra={"node": node.name, "reason": str(error)})
            continue
        partitions |= {one.partition: one._replace(memory=size) for one, size in zip(here, sizes, strict=True)}
        if node.takes_partitions:
            in_force = [one for one in here if one.state != "sealed"]
            topics = Counter(one.topic_id for one in in_force)
            per_s = sum(one.per_s for one in in_force)
            loads.append(NodeLoad(node.node_id, node.zone, memory, limit, per_s, topics))
    return SystemLoads(loads, list(partitions.values()))


def _asked(runtime: Runtime, node: Node, here: Sequence[PlacedPartition]) -> tuple[int, int, list[int]]:
    logs = [partition_keys(runtime.prefix, one.partition).log for one in here]
    with runtime.connection(node) as connection:
        memory, *sizes = connection.call([("INFO", "memory"), *(("MEMORY", "USAGE", log) for log in logs)])
    lines = raise_for_reply(memory, node.address).decode().splitlines()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(facts["used_memory"]), int(facts.get("maxmemory", 0)), [_size(reply) for reply in sizes]


def _size(reply: Any) -> int:
    # Managed servers may forbid MEMORY.
    return 0 if isinstance(reply, Exception) else int(reply or 0)
