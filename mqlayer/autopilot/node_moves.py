"""Move partitions off loaded nodes, and onto empty ones: pure rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from mqlayer.autopilot.auto_topics import AutoCluster, AutoNode, AutoPartition, AutoTopic
from mqlayer.autopilot.verdicts import Proposal, Verdict

BALANCED: Final = 1.10
"""A node may have so much more than the mean rate."""
CPU_MOST: Final = 0.7
MEMORY_MOST: Final = 0.8
"""Of maxmemory."""
ROOM: Final = 0.9
"""A target has less than this part of the limits."""
LEAST_PER_S: Final = 50.0
"""Nodes with less on average are not balanced: idle systems stay as they are."""
APART_S: Final = 60.0
"""Between two moves of any topics: the loads of the first one show by then."""


def shed_nodes(topic: AutoTopic, cluster: AutoCluster) -> Iterator[Verdict]:
    """Move a partition off the most loaded node that has one to give, down to the mean."""
    nodes = [one for one in cluster.nodes if one.serving]
    if len(nodes) < 2 or cluster.last_move_ago_s < APART_S or _leaves(topic, cluster):
        return
    mean = sum(one.per_s for one in nodes) / len(nodes)
    for source in sorted(nodes, key=lambda one: (-_pressure(one, mean), one.node)):
        shed = shed_of(source, mean)
        if shed is None:
            return
        why, excess = shed
        for target in _targets(topic, nodes, source):
            one = _fitting(topic.partitions, source, target, excess)
            if one is not None:
                reason = f"node {source.name} has {why}; {one.per_s:,.0f} messages/s go to {target.name}"
                yield Proposal("move", (one.partition,), reason, node=target.node)
                return


def shed_of(node: AutoNode, mean: float) -> tuple[str, float] | None:
    """Return why a node is loaded, and how many messages per second it should shed; None where it is not."""
    for name, part, most in (("CPU", node.cpu, CPU_MOST), ("memory", node.memory, MEMORY_MOST)):
        if part is not None and part > most:
            return f"{part:.0%} of its {name}, {most:.0%} are allowed", node.per_s * (part - most) / part
    if mean >= LEAST_PER_S and node.per_s > BALANCED * mean:
        return f"{node.per_s:,.0f} messages/s, {node.per_s / mean:.2f} times the mean", node.per_s - mean
    return None


def _pressure(node: AutoNode, mean: float) -> float:
    rate = node.per_s / (BALANCED * mean) if mean >= LEAST_PER_S else 0.0
    return max((node.cpu or 0.0) / CPU_MOST, (node.memory or 0.0) / MEMORY_MOST, rate)


def _leaves(topic: AutoTopic, cluster: AutoCluster) -> bool:
    """Whether a drain moves partitions of the topic: its moves go first."""
    draining = {one.node for one in cluster.nodes if one.draining}
    return any(one.node in draining for one in topic.partitions)


def _targets(topic: AutoTopic, nodes: Sequence[AutoNode], source: AutoNode) -> list[AutoNode]:
    """Return nodes with room that hold its class, in the home zone if that has nodes, the least loaded first."""
    others = [one for one in nodes if one.node not in {source.node, *topic.unfit} and _has_room(one)]
    at_home = [one for one in nodes if topic.home_zone and one.zone == topic.home_zone]
    allowed = [one for one in others if one in at_home] if at_home else others
    return sorted(allowed, key=lambda one: (one.per_s, one.partitions, one.node))


def _has_room(node: AutoNode) -> bool:
    return (node.cpu or 0.0) < ROOM * CPU_MOST and (node.memory or 0.0) < ROOM * MEMORY_MOST


def _fitting(
    partitions: Sequence[AutoPartition], source: AutoNode, target: AutoNode, excess: float
) -> AutoPartition | None:
    """Return the partition nearest to the excess that leaves the target below the source of before."""
    gap = source.per_s - target.per_s
    fitting = [one for one in partitions if one.node == source.node and not one.draining and 0 < one.per_s < ROOM * gap]
    return min(fitting, key=lambda one: (abs(one.per_s - excess), one.partition), default=None)
