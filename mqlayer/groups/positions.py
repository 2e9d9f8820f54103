"""Groups' positions on nodes: for display and inbox cleaning, never for a decision that later answers could reverse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.redis.node_connection import Node
from mqlayer.redis.read_scripts import GroupPosition, position_command, position_reply
from mqlayer.runtime.runtime import Runtime


class GroupPartition(NamedTuple):
    """A group at a partition, its start there, and its seek number."""

    node: NodeId
    partition: int
    group_id: int
    start: int
    seek: int


@dataclass(frozen=True, slots=True)
class GroupPositions:
    """Positions, and the reasons of unreachable nodes."""

    positions: Mapping[tuple[int, int], GroupPosition | None] = field(default_factory=dict)
    """By (partition, group); None if the node lacks the partition."""
    unreachable: Mapping[NodeId, str] = field(default_factory=dict)

    def at(self, partition: int, group_id: int) -> GroupPosition | None:
        """Return a position; None also if its node is unavailable."""
        return self.positions.get((partition, group_id))


def read_positions(
    runtime: Runtime, nodes: Iterable[Node], group_partitions: Iterable[GroupPartition]
) -> GroupPositions:
    """Read positions since each group's last seek, in one call per node. Never raises for an unavailable node."""
    by_node: dict[NodeId, list[GroupPartition]] = {}
    for group_partition in group_partitions:
        by_node.setdefault(group_partition.node, []).append(group_partition)
    known = {node.node_id: node for node in nodes}
    found: dict[tuple[int, int], GroupPosition | None] = {}
    unreachable: dict[NodeId, str] = {}
    for node_id, wanted in by_node.items():
        try:
            with runtime.connection(known[node_id]) as connection:
                commands = [
                    position_command(
                        connection,
                        runtime.prefix,
                        group_partition.partition,
                        group_partition.group_id,
                        start=group_partition.start,
                        seek=group_partition.seek,
                    )
                    for group_partition in wanted
                ]
                replies = connection.call(commands)
                positions = [position_reply(reply, connection.node.address) for reply in replies]
        except MqlayerError as error:
            unreachable[node_id] = str(error)
            continue
        found |= {
            (group_partition.partition, group_partition.group_id): position
            for group_partition, position in zip(wanted, positions, strict=True)
        }
    return GroupPositions(found, unreachable)
