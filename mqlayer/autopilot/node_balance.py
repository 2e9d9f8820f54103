"""Move partitions between nodes by hand, by the rule of automatic routes: `mqlayer node balance`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mqlayer.autopilot.auto_topics import AutoCluster, AutoNode, AutoPartition, AutoTopic
from mqlayer.autopilot.budgets import ACTOR
from mqlayer.autopilot.loads import LoadFigures
from mqlayer.autopilot.node_moves import shed_nodes
from mqlayer.autopilot.policy import PolicyState, RoutePolicy
from mqlayer.autopilot.verdicts import Proposal
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.postgres.queries import query
from mqlayer.routes import DrainMove
from mqlayer.routes.drain_plan import change_pauses
from mqlayer.routes.node_loads import PlacedPartition, SystemLoads, read_loads
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.durability import DurableTopic, durable_topics, unfit_nodes

MOVES_MOST: Final = 100
"""Of one plan."""


@dataclass(frozen=True, slots=True)
class BalanceMove:
    """A move off a loaded node. `source`: its name; `reason`: why."""

    move: DrainMove
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class BalancePlan:
    """Moves in their order. `pause_s`, `longest_pause_s`: of publishers per move, by earlier changes."""

    moves: Sequence[BalanceMove]
    pause_s: float | None
    longest_pause_s: float | None


def plan_balance(runtime: Runtime) -> BalancePlan:
    """Plan moves until no node is loaded; change nothing.

    Each one is the move that automatic routes would make next, in any topic, by the rates of the last minutes.
    """
    loads = read_loads(runtime)
    with runtime.control.connection() as connection:
        rows = connection.execute(query("auto_nodes"), {"actor": ACTOR}).fetchall()
    answering = {one.node for one in loads.nodes}
    nodes = {
        node: AutoNode(
            node, name, node in answering, _rate_on(loads, node), _count_on(loads, node), cpu, memory, zone, draining
        )
        for node, name, _, draining, zone, _, _, cpu, memory, _ in rows
    }
    pause_s, longest_s = change_pauses(runtime)
    return BalancePlan(_moves(loads, nodes, durable_topics(runtime)), pause_s, longest_s)


def _moves(loads: SystemLoads, nodes: dict[NodeId, AutoNode], durable: Mapping[str, DurableTopic]) -> list[BalanceMove]:
    limits = {one.node: one.memory_limit for one in loads.nodes}
    placed = {one.partition: one for one in loads.partitions}
    topics = _topics(loads, durable)
    moves: list[BalanceMove] = []
    while len(moves) < MOVES_MOST:
        cluster = AutoCluster(list(nodes.values()))
        found = next(((topic, one) for topic in topics.values() for one in shed_nodes(topic, cluster)), None)
        if found is None or not isinstance(found[1], Proposal) or found[1].node is None:
            break
        topic, proposal = found
        one, target = placed[PartitionId(proposal.partitions[0])], nodes[found[1].node]
        at_home = topic.home_zone in ("", target.zone)
        facts = (one.topic, one.partition, target.node, target.name, one.per_s, one.memory, True, at_home)
        moves.append(BalanceMove(DrainMove(*facts), nodes[one.node].name, proposal.reason))
        nodes |= _after(one, nodes[one.node], target, limits)
        topics[topic.topic_id] = _without(topic, one)
    return moves


def _topics(loads: SystemLoads, durable: Mapping[str, DurableTopic]) -> dict[int, AutoTopic]:
    """Return topics by id, with the partitions that may move."""
    found: dict[int, list[PlacedPartition]] = {}
    for one in loads.partitions:
        if one.state == "open" and not one.deleting and not one.unfinished:
            found.setdefault(one.topic_id, []).append(one)
    return {
        topic: AutoTopic(
            topic, ones[0].topic, 0, RoutePolicy(), PolicyState(),
            tuple(AutoPartition(one.partition, one.node, 0, 0, figures=LoadFigures(one.per_s)) for one in ones),
            home_zone=ones[0].home_zone, unfit=unfit_nodes(durable, ones[0].topic),
        )
        for topic, ones in sorted(found.items())
    }  # fmt: skip


def _after(
    one: PlacedPartition, source: AutoNode, target: AutoNode, limits: Mapping[NodeId, int]
) -> dict[NodeId, AutoNode]:
    """Return both nodes as they are behind a move; a partition's CPU goes by its rate."""
    cpu = 0.0 if not source.cpu or not source.per_s else source.cpu * one.per_s / source.per_s

    def with_part(node: AutoNode, sign: int) -> AutoNode:
        limit = limits.get(node.node, 0)
        return replace(
            node,
            per_s=node.per_s + sign * one.per_s,
            partitions=node.partitions + sign,
            cpu=None if node.cpu is None else max(0.0, node.cpu + sign * cpu),
            memory=None if node.memory is None or not limit else max(0.0, node.memory + sign * one.memory / limit),
        )

    return {source.node: with_part(source, -1), target.node: with_part(target, 1)}


def _without(topic: AutoTopic, moved: PlacedPartition) -> AutoTopic:
    """Return a topic without a partition: it moves once."""
    return replace(topic, partitions=tuple(one for one in topic.partitions if one.partition != moved.partition))


def _rate_on(loads: SystemLoads, node: NodeId) -> float:
    return sum(one.per_s for one in loads.on(node) if one.state == "open")


def _count_on(loads: SystemLoads, node: NodeId) -> int:
    return sum(one.state == "open" for one in loads.on(node))
