"""Where groups are in partitions, as the nodes say it: for people, and for the cleaning of the inbox, which asks how
old what is unsettled is at most. Never for a decision that a later answer could turn.

A position counts since the group's last seek: what was committed before that is void, and it starts where Postgres
says (see `seeking`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.redis.looking import Look, look_command, look_reply
from mqlayer.redis.nodes import Node, NodeConnection


class Spot(NamedTuple):
    """A group at a partition, where it starts there, and how often it was sent elsewhere."""

    node: NodeId
    partition: int
    group_id: int
    start: int
    seek: int


@dataclass(frozen=True, slots=True)
class Looks:
    """What the nodes said, and why others did not."""

    found: Mapping[tuple[int, int], Look | None] = field(default_factory=dict)
    """By partition and group; None where the node does not have the partition."""
    away: Mapping[NodeId, str] = field(default_factory=dict)

    def at(self, partition: int, group_id: int) -> Look | None:
        """Return what is known of a group at a partition; None also where its node is away."""
        return self.found.get((partition, group_id))


def look_at(nodes: Iterable[Node], spots: Iterable[Spot], *, prefix: str, unsafe: bool = False) -> Looks:
    """Ask each node once, in one write, where groups are; a node that can't be asked is told, not an error."""
    by_node: dict[NodeId, list[Spot]] = {}
    for spot in spots:
        by_node.setdefault(spot.node, []).append(spot)
    known = {node.node_id: node for node in nodes}
    found: dict[tuple[int, int], Look | None] = {}
    away: dict[NodeId, str] = {}
    for node_id, wanted in by_node.items():
        try:
            with NodeConnection(known[node_id], unsafe=unsafe) as line:
                commands = [
                    look_command(line, prefix, spot.partition, spot.group_id, start=spot.start, seek=spot.seek)
                    for spot in wanted
                ]
                replies = line.call(commands)
                looks = [look_reply(reply, line.node.address) for reply in replies]
        except MqlayerError as error:
            away[node_id] = str(error)
            continue
        found |= {(spot.partition, spot.group_id): look for spot, look in zip(wanted, looks, strict=True)}
    return Looks(found, away)
