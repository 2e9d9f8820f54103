"""Assignments are balanced, sticky, deterministic, and move few partitions."""

from __future__ import annotations

from collections import Counter
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from mqlayer.domain.assignment import assign
from mqlayer.domain.routing import PartitionId

PARTITIONS = st.integers(0, 40).map(lambda count: [PartitionId(number) for number in range(1, count + 1)])
MEMBERS = st.sets(st.sampled_from([f"m{number}" for number in range(12)]), max_size=12)


@st.composite
def balanced(draw: st.DrawFn) -> tuple[list[PartitionId], list[str], dict[PartitionId, str]]:
    """Draw partitions, members, and a balanced assignment that came about by joining and leaving."""
    partitions, members = draw(PARTITIONS), sorted(draw(MEMBERS.filter(bool)))
    current: dict[PartitionId, str] = {}
    for size in range(1, len(members) + 1):
        current = assign(partitions, members[:size], current)
    return partitions, members, current


@given(PARTITIONS, MEMBERS, st.data())
def test_every_partition_has_one_member_and_shares_differ_by_one_at_most(
    partitions: list[PartitionId], members: set[str], data: st.DataObject
) -> None:
    owners = st.sampled_from(sorted(members | {"gone"}))
    current = data.draw(st.dictionaries(st.sampled_from(partitions), owners)) if partitions else {}
    wanted = assign(partitions, members, current)
    if not members:
        assert wanted == {}
        return
    assert sorted(wanted) == partitions
    shares = Counter(dict.fromkeys(members, 0)) + Counter(wanted.values())
    counts = [shares[member] for member in members]
    assert max(counts) - min(counts) <= 1
    assert assign(partitions[::-1], sorted(members, reverse=True), current) == wanted


@given(balanced())
def test_what_is_balanced_stays_as_it_is(
    state: tuple[list[PartitionId], list[str], dict[PartitionId, str]],
) -> None:
    partitions, members, current = state
    assert assign(partitions, members, current) == current


@given(balanced(), st.sampled_from(["a-first", "zz-last", "m0-between"]))
def test_one_more_member_moves_few_partitions_and_all_of_them_to_itself(
    state: tuple[list[PartitionId], list[str], dict[PartitionId, str]], newcomer: str
) -> None:
    partitions, members, current = state
    wanted = assign(partitions, [*members, newcomer], current)
    moved = {partition for partition in partitions if wanted[partition] != current[partition]}
    assert len(moved) <= ceil(len(partitions) / (len(members) + 1))
    assert {wanted[partition] for partition in moved} <= {newcomer}


@given(balanced(), st.data())
def test_when_a_member_leaves_only_its_partitions_move(
    state: tuple[list[PartitionId], list[str], dict[PartitionId, str]], data: st.DataObject
) -> None:
    partitions, members, current = state
    leaver = data.draw(st.sampled_from(members))
    wanted = assign(partitions, [member for member in members if member != leaver], current)
    for partition, member in wanted.items():
        assert member == current[partition] or current[partition] == leaver
