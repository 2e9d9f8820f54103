"""Where groups are in partitions, as the nodes say it: for people, and for the cleaning of the inbox, which asks how
old what is unsettled is at most. Never for a decision that a later answer could turn.

A position counts since the group's last seek: what was committed before that is void, and it starts where Postgres
says (see `seek`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.read_scripts import GroupPosition, position_command, position_reply


class GroupPartition(NamedTuple):
    """A group at a partition, where it starts there, and how often it was sent elsewhere."""

    node: NodeId
    partition: int
    group_id: int
    start: int
    seek: int


@dataclass(frozen=True, slots=True)
class GroupPositions:
    """What the nodes said, and why others did not."""

    positions: Mapping[tuple[int, int], GroupPosition | None] = field(default_factory=dict)
    """By partition and group; None where the node does not have the partition."""
    unreachable: Mapping[NodeId, str] = field(default_factory=dict)

    def at(self, partition: int, group_id: int) -> GroupPosition | None:
        """Return what is known of a group at a partition; None also where its node is away."""
        return self.positions.get((partition, group_id))


def read_positions(
    nodes: Iterable[Node], group_partitions: Iterable[GroupPartition], *, prefix: str, unsafe: bool = False
) -> GroupPositions:
    """Ask each node once, in one write, where groups are; a node that can't be asked is told, not an error."""
    by_node: dict[NodeId, list[GroupPartition]] = {}
    for group_partition in group_partitions:
        by_node.setdefault(group_partition.node, []).append(group_partition)
    known = {node.node_id: node for node in nodes}
    found: dict[tuple[int, int], GroupPosition | None] = {}
    unreachable: dict[NodeId, str] = {}
    for node_id, wanted in by_node.items():
        try:
            with NodeConnection(known[node_id], unsafe=unsafe) as connection:
                commands = [
                    position_command(
                        connection,
                        prefix,
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
