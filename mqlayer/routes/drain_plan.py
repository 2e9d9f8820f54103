"""Plan how a node drains: the moves, their pauses, and how long groups need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mqlayer.domain.routing import NodeId
from mqlayer.groups.positions import GroupPartition, read_positions
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Node
from mqlayer.routes.node_loads import PlacedPartition, read_loads
from mqlayer.routes.placement import place
from mqlayer.runtime.route_cache import load_nodes, node_names
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.durability import durable_topics, unfit_nodes
from mqlayer.topics.node_draining import no_target_conflict
from mqlayer.topics.nodes import find_node

MEASURED_CHANGES: Final = 50


@dataclass(frozen=True, slots=True)
class DrainMove:
    """A move off a node. `memory`: bytes; `fits`: into the target's memory."""

    topic: str
    partition: int
    target: NodeId
    target_name: str
    per_s: float
    memory: int
    fits: bool
    at_home: bool


@dataclass(frozen=True, slots=True)
class GroupDrain:
    """Unsettled messages of a group on a node; None: not known. `per_s`: its measured settle rate."""

    topic: str
    group: str
    left: int | None
    per_s: float | None
    paused: bool

    @property
    def drain_s(self) -> float | None:
        """Predicted seconds until the parents are drained; None: not known."""
        if self.left == 0:
            return 0.0
        if self.paused or self.left is None or not self.per_s or self.per_s <= 0:
            return None
        return self.left / self.per_s


@dataclass(frozen=True, slots=True)
class DrainPlan:
    """How a node drains. `pause_s`, `longest_pause_s`: of publishers per move, by earlier changes.

    `sealed`: partitions that moved before and wait for groups; `held`: reasons why partitions can't leave.
    """

    node: Node
    moves: Sequence[DrainMove]
    sealed: Sequence[int]
    groups: Sequence[GroupDrain]
    held: Mapping[int, str]
    pause_s: float | None
    longest_pause_s: float | None


def plan_drain(runtime: Runtime, name: str) -> DrainPlan:
    """Plan to drain a node; change nothing. Raises Conflict without another node that answers."""
    node = find_node(runtime.control, name)
    loads = read_loads(runtime)
    here = loads.on(node.node_id)
    targets = [one for one in loads.nodes if one.node != node.node_id]
    movable = [one for one in here if one.state == "open" and not one.deleting]
    if movable and not targets:
        raise no_target_conflict(name, load_nodes(runtime.control))
    by_id = {one.partition: one for one in movable}
    names = node_names(runtime.control)
    durable = durable_topics(runtime)
    demands = (replace(one.load, unfit=unfit_nodes(durable, one.topic)) for one in movable)
    moves = []
    for partition, target, fits, at_home in place(demands, targets) if movable else ():
        one = by_id[partition]
        facts = (one.topic, partition, target, names[target], one.per_s, one.memory, fits, at_home)
        moves.append(DrainMove(*facts))
    pause_s, longest_s = change_pauses(runtime)
    sealed = [one.partition for one in here if one.state == "sealed"]
    left: dict[int, str] = {one.partition: reason for one in here if (reason := held_by(one))}
    groups = group_drains(runtime, [one.partition for one in here if one.state != "importing"])
    return DrainPlan(node, moves, sealed, groups, left, pause_s, longest_s)


def held_by(one: PlacedPartition) -> str:
    """Return why a partition will not leave its node by itself, or ""."""
    if one.deleting:
        return f"topic {one.topic} is being deleted: mqlayer topic delete {one.topic} --yes"
    if one.unfinished:
        return f"topic {one.topic} is half created: mqlayer topic create {one.topic}"
    if not one.kept_by_groups:
        return f"topic {one.topic} has no group, and keeps all its messages: create one, or delete the topic"
    return ""


def group_drains(runtime: Runtime, partitions: Sequence[int]) -> list[GroupDrain]:
    """Return the groups that have not drained these partitions."""
    with runtime.control.connection() as connection:
        rows = connection.execute(query("draining_groups"), {"partitions": list(partitions)}).fetchall()
    wanted = [GroupPartition(row[1], row[0], row[2], start=row[5], seek=row[6]) for row in rows]
    positions = read_positions(runtime, load_nodes(runtime.control), wanted)
    facts: dict[tuple[str, str], tuple[float | None, bool]] = {}
    left: Counter[tuple[str, str]] = Counter()
    unknown: set[tuple[str, str]] = set()
    for partition, _, group_id, topic, group, _, _, paused, per_s in rows:
        facts[topic, group] = per_s, paused
        position = positions.at(partition, group_id)
        if position is None:
            unknown.add((topic, group))
        else:
            left[topic, group] += position.unsettled
    return [
        GroupDrain(*name, None if name in unknown else left[name], per_s, paused)
        for name, (per_s, paused) in sorted(facts.items())
    ]


def change_pauses(runtime: Runtime) -> tuple[float | None, float | None]:
    """Return the mean and the longest pause of publishers in the last changes; None: none was measured."""
    with runtime.control.connection() as connection:
        row = connection.execute(query("change_durations"), {"limit": MEASURED_CHANGES}).fetchone()
    return (row[0], row[1]) if row else (None, None)
