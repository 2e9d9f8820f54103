"""Choose nodes for partitions: pure rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from mqlayer.domain.route_changes import no_other_node
from mqlayer.domain.routing import NodeId, PartitionId

MEMORY_PART: Final = 0.8
"""A node is full beyond this part of its memory limit."""


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """A node's load. `memory`: bytes; `memory_limit`: 0 without one; `topics`: partitions by topic."""

    node: NodeId
    zone: str = ""
    memory: int = 0
    memory_limit: int = 0
    per_s: float = 0.0
    topics: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PartitionDemand:
    """A partition's load. `memory`: bytes; `home_zone`: the preferred one; `unfit`: nodes that can't hold its class."""

    partition: PartitionId
    topic_id: int
    memory: int = 0
    per_s: float = 0.0
    home_zone: str = ""
    unfit: frozenset[NodeId] = frozenset()


class Placement(NamedTuple):
    """A partition's node. `fits`: into its memory."""

    partition: PartitionId
    node: NodeId
    fits: bool
    at_home: bool


def place(partitions: Iterable[PartitionDemand], nodes: Sequence[NodeLoad]) -> list[Placement]:
    """Place partitions, the heaviest first: by durability class, memory, home, then where load is least.

    Load: the sum of a node's shares of memory, rate, partitions and partitions of the topic. Raises Conflict
    without nodes.
    """
    if not nodes:
        raise no_other_node()
    wanted = list(partitions)
    chooser = _Chooser(nodes, wanted)
    heaviest_first = sorted(wanted, key=lambda one: (-chooser.weight(one), one.partition))
    return sorted(chooser.choose(one) for one in heaviest_first)


class _Chooser:
    def __init__(self, nodes: Sequence[NodeLoad], partitions: Sequence[PartitionDemand]) -> None:
        self._nodes = {one.node: one for one in sorted(nodes, key=lambda one: one.node)}
        self._memory = {one.node: one.memory for one in nodes}
        self._per_s = {one.node: one.per_s for one in nodes}
        self._topics = {one.node: Counter(one.topics) for one in nodes}
        self._all_memory = sum(self._memory.values()) + sum(one.memory for one in partitions)
        self._all_per_s = sum(self._per_s.values()) + sum(one.per_s for one in partitions)
        self._all_topics = sum(self._topics.values(), Counter(one.topic_id for one in partitions))

    def weight(self, one: PartitionDemand) -> float:
        """Return its share of memory and rate."""
        return _share(one.memory, self._all_memory) + _share(one.per_s, self._all_per_s)

    def choose(self, one: PartitionDemand) -> Placement:
        """Place one more."""
        in_zones = [node for node, load in self._nodes.items() if load.zone == one.home_zone]
        at_home = set(in_zones) if one.home_zone else set(self._nodes)
        node = min(
            self._nodes,
            key=lambda node: (
                node in one.unfit,
                not self._fits(node, one),
                node not in at_home,
                self._load_with(node, one),
                node,
            ),
        )
        fits = self._fits(node, one)
        self._memory[node] += one.memory
        self._per_s[node] += one.per_s
        self._topics[node][one.topic_id] += 1
        return Placement(one.partition, node, fits, node in at_home)

    def _fits(self, node: NodeId, one: PartitionDemand) -> bool:
        limit = self._nodes[node].memory_limit
        return not limit or self._memory[node] + one.memory <= MEMORY_PART * limit

    def _load_with(self, node: NodeId, one: PartitionDemand) -> float:
        topics = self._topics[node]
        # Rounded: equal nodes must not differ by the order of additions.
        return round(
            _share(self._memory[node] + one.memory, self._all_memory)
            + _share(self._per_s[node] + one.per_s, self._all_per_s)
            + _share(topics.total() + 1, self._all_topics.total())
            + _share(topics[one.topic_id] + 1, self._all_topics[one.topic_id]),
            9,
        )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
