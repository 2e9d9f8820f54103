"""Partitions are placed where memory suffices, at home, and evenly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.errors import Conflict
from mqlayer.routes.placement import MEMORY_PART, NodeLoad, PartitionDemand, place

ZONES = st.sampled_from(["", "a", "b"])
NODES = st.lists(
    st.builds(
        NodeLoad,
        st.just(NodeId(0)),
        zone=ZONES,
        memory=st.integers(0, 1_000),
        memory_limit=st.sampled_from([0, 500, 1_000, 2_000]),
        per_s=st.floats(0, 1_000),
        topics=st.dictionaries(st.integers(1, 3), st.integers(0, 5)),
    ),
    min_size=1,
    max_size=5,
).map(lambda nodes: [replace(one, node=NodeId(number)) for number, one in enumerate(nodes, 1)])
PARTITIONS = st.lists(
    st.builds(
        PartitionDemand,
        st.just(PartitionId(0)),
        st.integers(1, 3),
        memory=st.integers(0, 300),
        per_s=st.floats(0, 300),
        home_zone=ZONES,
    ),
    max_size=20,
).map(lambda ones: [replace(one, partition=PartitionId(number)) for number, one in enumerate(ones, 1)])


@given(PARTITIONS, NODES)
def test_every_partition_has_one_node_and_the_choice_does_not_depend_on_an_order(
    partitions: list[PartitionDemand], nodes: list[NodeLoad]
) -> None:
    placed = place(partitions, nodes)
    assert [one.partition for one in placed] == [one.partition for one in partitions]
    assert {one.node for one in placed} <= {one.node for one in nodes}
    assert place(partitions[::-1], nodes[::-1]) == placed


@given(PARTITIONS, NODES)
def test_memory_goes_before_the_home_and_the_home_before_the_load(
    partitions: list[PartitionDemand], nodes: list[NodeLoad]
) -> None:
    """Judged for the lightest partition, which is placed last: all nodes are then as full as they get."""
    placed = {one.partition: one for one in place(partitions, nodes)}
    memory = Counter({one.node: one.memory for one in nodes})
    for one in partitions:
        memory[placed[one.partition].node] += one.memory
    limits = {one.node: one.memory_limit for one in nodes}
    zones = {one.node: one.zone for one in nodes}
    for one in partitions:
        chosen = placed[one.partition]
        fitting = [
            node for node in limits if not limits[node] or memory[node] + one.memory <= MEMORY_PART * limits[node]
        ]
        homes = [node for node in fitting if zones[node] == one.home_zone or not one.home_zone]
        # What still fits at the end fitted all the time.
        assert chosen.fits or not fitting
        assert chosen.at_home or not homes
        assert chosen.at_home == (not one.home_zone or zones[chosen.node] == one.home_zone)


@given(st.integers(0, 30), st.integers(1, 5))
def test_equal_partitions_are_spread_evenly(count: int, node_count: int) -> None:
    partitions = [PartitionDemand(PartitionId(number), 1, memory=10, per_s=5.0) for number in range(count)]
    nodes = [NodeLoad(NodeId(number)) for number in range(node_count)]
    counts = Counter(dict.fromkeys((one.node for one in nodes), 0))
    counts.update(one.node for one in place(partitions, nodes))
    assert max(counts.values()) - min(counts.values()) <= 1


def test_the_heaviest_go_apart_and_a_loaded_node_gets_less() -> None:
    heavy = [PartitionDemand(PartitionId(number), number, memory=1_000, per_s=1_000.0) for number in (1, 2)]
    light = [PartitionDemand(PartitionId(number), number) for number in range(3, 9)]
    nodes = [NodeLoad(NodeId(1), per_s=3_000.0, memory=3_000), NodeLoad(NodeId(2)), NodeLoad(NodeId(3))]
    placed = {one.partition: one.node for one in place([*heavy, *light], nodes)}
    assert {placed[PartitionId(1)], placed[PartitionId(2)]} == {2, 3}


def test_there_may_be_no_node() -> None:
    with pytest.raises(Conflict, match="register one"):
        place([], [])
