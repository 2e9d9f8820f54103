"""Moves between nodes: they end, even the load out, fill a new node, and never go back and forth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqlayer.autopilot import AutoCluster, AutoNode, AutoPartition, AutoTopic, LoadFigures, PolicyState, RoutePolicy
from mqlayer.autopilot.node_moves import APART_S, BALANCED, LEAST_PER_S, ROOM, shed_nodes, shed_of
from mqlayer.autopilot.verdicts import Proposal
from mqlayer.domain.routing import NodeId

RATES = st.lists(st.sampled_from([0.0, 5.0, 40.0, 200.0, 1_000.0]), min_size=1, max_size=24)


class Cluster:
    """Partitions of some topics on nodes, under a constant load; moves take effect at once."""

    def __init__(self, rates: Sequence[float], homes: Sequence[int], nodes: int, topics: int = 2) -> None:
        self.rates, self.homes, self.topics = list(rates), [NodeId(home) for home in homes], topics
        self.nodes = [AutoNode(NodeId(number), f"n{number}") for number in range(1, nodes + 1)]
        self.moves: list[int] = []

    @property
    def loads(self) -> dict[NodeId, float]:
        """Messages per second by node."""
        found = {one.node: 0.0 for one in self.nodes}
        for rate, home in zip(self.rates, self.homes, strict=True):
            found[home] += rate
        return found

    def step(self) -> bool:
        """Let each topic in turn propose, and make the first move; whether there was one."""
        loads = self.loads
        cluster = AutoCluster([replace(one, per_s=loads[one.node]) for one in self.nodes])
        for number in range(self.topics):
            for verdict in shed_nodes(self._topic(number), cluster):
                assert isinstance(verdict, Proposal)
                assert verdict.node is not None
                self.homes[verdict.partitions[0]] = verdict.node
                self.moves.append(verdict.partitions[0])
                return True
        return False

    def _topic(self, number: int) -> AutoTopic:
        parts = tuple(
            AutoPartition(place, home, place, place + 1, 1e5, figures=LoadFigures(rate, rate, True))
            for place, (rate, home) in enumerate(zip(self.rates, self.homes, strict=True))
            if place % self.topics == number
        )
        return AutoTopic(number, f"t{number}", 1, RoutePolicy(mode="on"), PolicyState(), parts)


@given(RATES, st.data(), st.integers(1, 5))
def test_moves_end_and_leave_no_move_that_would_even_it_out(
    rates: list[float], data: st.DataObject, nodes: int
) -> None:
    homes = [data.draw(st.integers(1, nodes)) for _ in rates]
    cluster = Cluster(rates, homes, nodes)
    highest = max(cluster.loads.values())
    for _ in range(8 * len(rates)):
        if not cluster.step():
            break
        assert max(cluster.loads.values()) <= highest
        highest = max(cluster.loads.values())
    assert not cluster.step(), "it moves for ever"
    loads = cluster.loads
    mean = sum(loads.values()) / nodes
    for rate, home in zip(cluster.rates, cluster.homes, strict=True):
        least = min(loads.values())
        loaded = mean >= LEAST_PER_S and loads[home] > BALANCED * mean and loads[home] == max(loads.values())
        assert not loaded or not 0 < rate < ROOM * (loads[home] - least)


def test_equal_partitions_are_balanced_within_a_tenth_and_a_new_node_is_filled() -> None:
    cluster = Cluster([50.0] * 40, [1 + number % 2 for number in range(40)], nodes=3)
    while cluster.step():
        pass
    mean = sum(cluster.loads.values()) / 3
    assert max(cluster.loads.values()) <= BALANCED * mean
    # Not one more than the new node lacks, and none twice.
    assert len(cluster.moves) == len(set(cluster.moves)) <= 14


@pytest.mark.parametrize("facts", [{"cpu": 0.9}, {"memory": 0.95}])
def test_a_node_short_of_processor_or_memory_sheds_to_one_with_room(facts: Mapping[str, float]) -> None:
    cluster = Cluster([10.0] * 10, [1] * 6 + [2] * 4, nodes=3)
    assert not cluster.step(), "the mean rate is too low to matter"
    cluster.nodes[0] = replace(cluster.nodes[0], **facts)  # type: ignore[arg-type]
    cluster.nodes[2] = replace(cluster.nodes[2], cpu=0.65)
    assert cluster.step()
    assert [cluster.homes.count(NodeId(number)) for number in (1, 2, 3)] == [5, 5, 0]
    assert shed_of(replace(cluster.nodes[0], per_s=100.0), 100.0) is not None
    assert shed_of(replace(cluster.nodes[1], per_s=100.0), 100.0) is None


def test_none_moves_to_a_draining_node_away_from_home_or_too_soon_after_another() -> None:
    cluster = Cluster([50.0] * 8, [1] * 8, nodes=3, topics=1)
    loads = cluster.loads
    nodes = [replace(one, per_s=loads[one.node], zone="west") for one in cluster.nodes]
    topic = replace(cluster._topic(0), home_zone="west")

    def target(*nodes: AutoNode, ago_s: float = APART_S) -> NodeId | None:
        verdicts = list(shed_nodes(topic, AutoCluster(nodes, ago_s)))
        return verdicts[0].node if verdicts and isinstance(verdicts[0], Proposal) else None

    first, second, third = nodes
    assert target(first, second, third) == 2
    assert target(first, replace(second, serving=False, draining=True), third) == 3
    assert target(first, replace(second, zone="east"), third) == 3
    assert target(first, replace(second, zone="east"), replace(third, zone="")) is None
    assert target(first, second, third, ago_s=APART_S - 1) is None
    # A drain moves its partitions away.
    assert target(replace(first, draining=True, serving=False), second, third) is None


def test_a_topic_moves_only_to_nodes_that_hold_its_class() -> None:
    nodes = [AutoNode(NodeId(1), "n1", per_s=400.0), AutoNode(NodeId(2), "n2"), AutoNode(NodeId(3), "n3", per_s=10.0)]
    parts = tuple(AutoPartition(one, NodeId(1), one, one + 1, figures=LoadFigures(100.0)) for one in range(4))
    topic = AutoTopic(1, "t", 1, RoutePolicy(mode="on"), PolicyState(), parts)
    (free,) = shed_nodes(topic, AutoCluster(nodes))
    (bound,) = shed_nodes(replace(topic, unfit=frozenset({NodeId(2)})), AutoCluster(nodes))
    assert isinstance(free, Proposal)
    assert isinstance(bound, Proposal)
    assert (free.node, bound.node) == (2, 3)
    assert list(shed_nodes(replace(topic, unfit=frozenset(map(NodeId, (2, 3)))), AutoCluster(nodes))) == []
