"""Plan splits, merges and moves: pure rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from mqlayer.domain.routing import LpRange, NodeId, PartitionId, Route, RouteVersion
from mqlayer.errors import Conflict, InvalidInput, NotFound

ChangeKind = Literal["split", "merge", "move"]
ChangeMode = Literal["live", "unreachable", "lost"]
"""The parent's node seals it now, or after returning, or is lost."""


@dataclass(frozen=True, slots=True)
class Successor:
    """A new partition: LPs in [lp_from, lp_to)."""

    lp_from: int
    lp_to: int
    node: NodeId


@dataclass(frozen=True, slots=True)
class ChangePlan:
    """A change's base version, parents and successors."""

    kind: ChangeKind
    topic: str
    topic_id: int
    base: RouteVersion
    parents: tuple[LpRange, ...]
    successors: tuple[Successor, ...]
    mode: ChangeMode = "live"

    @property
    def version(self) -> int:
        """The new route version."""
        return self.base + 1


def plan_split(route: Route, partition: int, at: Sequence[int], nodes: Sequence[NodeId] = ()) -> ChangePlan:
    """Split a partition at LPs; successors stay on its node by default.

    Raises NotFound for a partition not in force, InvalidInput for an empty part.
    """
    parent = _in_force(route, partition)
    points = sorted(at)
    if not points or len(set(points)) < len(points):
        raise InvalidInput("a split needs one LP or several different ones to split at")
    for point in points:
        if not parent.lp_from < point < parent.lp_to:
            raise InvalidInput(
                f"can't split partition {partition} at LP {point}: a part would be empty; it serves "
                f"[{parent.lp_from}, {parent.lp_to}), so split at {parent.lp_from + 1} to {parent.lp_to - 1}"
            )
    ranges = list(pairwise((parent.lp_from, *points, parent.lp_to)))
    homes = list(nodes) or [parent.node]
    if len(homes) not in (1, len(ranges)):
        raise InvalidInput(f"the split makes {len(ranges)} partitions: name one node for all, or {len(ranges)} nodes")
    homes = homes * len(ranges) if len(homes) == 1 else homes
    made = tuple(Successor(lo, hi, node) for (lo, hi), node in zip(ranges, homes, strict=True))
    return ChangePlan("split", route.topic, route.topic_id, route.version, (parent,), made)


def plan_merge(route: Route, partitions: Sequence[int], node: NodeId | None = None) -> ChangePlan:
    """Merge adjacent partitions, by default onto the lowest one's node. Raises InvalidInput, NotFound."""
    parents = sorted((_in_force(route, p) for p in partitions), key=lambda r: r.lp_from)
    if len(parents) < 2 or len(set(partitions)) < len(partitions):
        raise InvalidInput("a merge takes two different partitions at the least")
    for left, right in pairwise(parents):
        if left.lp_to != right.lp_from:
            raise InvalidInput(
                f"can't merge partitions {left.partition} and {right.partition}: [{left.lp_from}, {left.lp_to}) and "
                f"[{right.lp_from}, {right.lp_to}) are not adjacent; name those between them too"
            )
    home = parents[0].node if node is None else node
    made = (Successor(parents[0].lp_from, parents[-1].lp_to, home),)
    return ChangePlan("merge", route.topic, route.topic_id, route.version, tuple(parents), made)


def plan_move(route: Route, partition: int, node: NodeId, *, mode: ChangeMode = "live") -> ChangePlan:
    """Move a partition to another node. Raises NotFound; InvalidInput if already there."""
    parent = _in_force(route, partition)
    if parent.node == node:
        raise InvalidInput(f"partition {partition} is on that node already")
    made = (Successor(parent.lp_from, parent.lp_to, node),)
    return ChangePlan("move", route.topic, route.topic_id, route.version, (parent,), made, mode)


def emptiest(nodes: Iterable[NodeId], in_use: Iterable[NodeId], *, other_than: NodeId) -> NodeId:
    """Return the least used other node. Raises Conflict without one."""
    counts = Counter(in_use)
    others = sorted((counts[node], node) for node in nodes if node != other_than)
    if not others:
        raise no_other_node()
    return others[0][1]


def no_other_node() -> Conflict:
    """Return the refusal of a move without a node to move to."""
    return Conflict("no other node takes partitions", "register one: mqlayer node register NAME URL")


def halving_point(loads: Mapping[int, int], lp_from: int, lp_to: int) -> int:
    """Return the LP that divides a range's load most evenly, else its middle.

    `loads`: messages per LP. Raises InvalidInput for a single LP.
    """
    if lp_to - lp_from < 2:
        raise InvalidInput(f"[{lp_from}, {lp_to}) is a single LP: it can't be split")
    before = list(accumulate((loads.get(lp, 0) for lp in range(lp_from, lp_to)), initial=0))
    total, middle = before[-1], (lp_from + lp_to) // 2
    points = range(lp_from + 1, lp_to)
    return min(points, key=lambda lp: (abs(total - 2 * before[lp - lp_from]), abs(lp - middle)))


def marks_within(marks: Iterable[Mapping[str, int]], lp_from: int, lp_to: int) -> dict[str, int]:
    """Return parents' marks ("<source>:<lp>" -> seq) in a range."""
    return {name: seq for of_one in marks for name, seq in of_one.items() if lp_from <= int(name.split(":")[1]) < lp_to}


def _in_force(route: Route, partition: int) -> LpRange:
    for r in route.ranges:
        if r.partition == PartitionId(partition):
            return r
    serving = ", ".join(str(r.partition) for r in route.ranges)
    raise NotFound("partition", partition, f"version {route.version} of topic {route.topic!r} has {serving}")
