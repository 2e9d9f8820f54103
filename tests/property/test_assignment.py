"""Assignments are balanced, sticky, deterministic, and move few partitions."""

from __future__ import annotations

from collections import Counter
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqlayer.domain.assignment import SLACK, Zones, assign, assign_by_rate
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


ZONES = st.sampled_from(["", "a", "b", "c"])


@st.composite
def zoned(draw: st.DrawFn) -> tuple[list[PartitionId], list[str], dict[PartitionId, str], Zones]:
    """Draw partitions, members, whatever owners, and zones of both."""
    partitions, members = draw(PARTITIONS), sorted(draw(MEMBERS.filter(bool)))
    owners = st.sampled_from([*members, "gone"])
    current = draw(st.dictionaries(st.sampled_from(partitions), owners)) if partitions else {}
    places = {partition: draw(ZONES) for partition in partitions}
    return partitions, members, current, Zones(places, {member: draw(ZONES) for member in members})


Zoned = tuple[list[PartitionId], list[str], dict[PartitionId, str], Zones]


@given(zoned())
def test_with_zones_shares_still_differ_by_one_at_most_and_the_choice_stays_once_it_is_made(drawn: Zoned) -> None:
    partitions, members, current, zones = drawn
    wanted = assign(partitions, members, current, zones)
    assert sorted(wanted) == partitions
    counts = Counter(dict.fromkeys(members, 0))
    counts.update(wanted.values())
    assert max(counts.values()) - min(counts.values()) <= 1
    assert assign(partitions, members, wanted, zones) == wanted
    assert assign(partitions[::-1], members[::-1], current, zones) == wanted


@given(zoned())
def test_no_partition_is_away_that_a_move_or_a_swap_would_bring_home(drawn: Zoned) -> None:
    partitions, members, current, zones = drawn
    wanted = assign(partitions, members, current, zones)
    counts = Counter(wanted.values())
    for partition, member in wanted.items():
        for other in (one for one in members if zones.is_away(partition, member) and zones.is_home(partition, one)):
            assert counts[other] >= counts[member]
            theirs = [one for one in partitions if wanted[one] == other]
            assert all(zones.is_home(one, other) or zones.rank(one, member) > zones.rank(one, other) for one in theirs)


@given(zoned())
def test_a_partition_leaves_a_member_with_room_only_for_its_home_or_in_exchange(drawn: Zoned) -> None:
    """Beyond the moves that the balance takes, each brings one home, or lets another go home."""
    partitions, members, current, zones = drawn
    plain, wanted = assign(partitions, members, current), assign(partitions, members, current, zones)
    moved = sum(current.get(one) in members and wanted[one] != current[one] for one in partitions)
    balance = sum(current.get(one) in members and plain[one] != current[one] for one in partitions)
    gained = sum(zones.is_home(one, wanted[one]) for one in partitions) - sum(
        zones.is_home(one, current[one]) for one in partitions if current.get(one) in members
    )
    assert moved <= balance + 2 * max(0, gained)


def test_members_of_two_zones_get_the_partitions_of_theirs() -> None:
    partitions = [PartitionId(number) for number in range(1, 9)]
    zones = Zones({one: "a" if one % 2 else "b" for one in partitions}, {"m1": "a", "m2": "b", "m3": "a", "m4": "b"})
    wanted = assign(partitions, ["m1", "m2", "m3", "m4"], {}, zones)
    assert all(zones.is_home(one, member) for one, member in wanted.items())
    # One zone is away: the other's members take all, and give them back later.
    alone = Zones({one: "a" if one % 2 else "b" for one in partitions}, {"m1": "a", "m3": "a"})
    shared = assign(partitions, ["m1", "m3"], wanted, alone)
    assert Counter(shared.values()) == {"m1": 4, "m3": 4}
    assert assign(partitions, ["m1", "m2", "m3", "m4"], shared, zones) == wanted


RATES = st.sampled_from([0.0, 0.0, 1.0, 5.0, 20.0, 300.0])


@st.composite
def rated(draw: st.DrawFn) -> tuple[list[PartitionId], list[str], dict[PartitionId, str], dict[PartitionId, float]]:
    """Draw partitions, members, whatever owners, and rates."""
    partitions, members = draw(PARTITIONS.filter(bool)), sorted(draw(MEMBERS.filter(bool)))
    owners = st.sampled_from([*members, "gone"])
    current = draw(st.dictionaries(st.sampled_from(partitions), owners))
    rates = draw(st.dictionaries(st.sampled_from(partitions), RATES))
    return partitions, members, current, rates


Rated = tuple[list[PartitionId], list[str], dict[PartitionId, str], dict[PartitionId, float]]


@given(rated())
def test_by_rate_every_partition_has_one_member_and_the_choice_stays_once_it_is_made(drawn: Rated) -> None:
    partitions, members, current, rates = drawn
    wanted = assign_by_rate(partitions, members, current, rates)
    assert sorted(wanted) == partitions
    assert set(wanted.values()) <= set(members)
    assert assign_by_rate(partitions, members, wanted, rates) == wanted
    assert assign_by_rate(partitions[::-1], members[::-1], current, rates) == wanted


@given(rated())
def test_by_rate_no_single_partition_could_be_moved_to_make_it_much_better(drawn: Rated) -> None:
    """The most loaded member is near the least loaded one, or has nothing that is worth moving."""
    partitions, members, current, rates = drawn
    wanted = assign_by_rate(partitions, members, current, rates)
    mean = sum(rates.values()) / len(partitions)
    weights = {p: rates.get(p, 0.0) + (0.1 * mean or 1.0) for p in partitions}
    loads = {member: sum(weights[p] for p in partitions if wanted[p] == member) for member in members}
    share = sum(weights.values()) / len(members)
    least = min(loads.values())
    for partition, member in wanted.items():
        gap = loads[member] - least
        after = abs(gap - 2 * weights[partition])
        assert gap <= SLACK * share + 1e-6 or after > gap - SLACK / 2 * share - 1e-6


def test_by_rate_hot_partitions_are_kept_apart_and_idle_ones_spread() -> None:
    partitions = [PartitionId(number) for number in range(1, 13)]
    rates = {PartitionId(1): 1000.0, PartitionId(2): 1000.0}
    current = dict.fromkeys(partitions, "a")
    wanted = assign_by_rate(partitions, ["a", "b"], current, rates)
    assert wanted[PartitionId(1)] != wanted[PartitionId(2)]
    assert Counter(wanted.values())["b"] in range(1, 9)
    # A little more here or there moves nothing.
    assert assign_by_rate(partitions, ["a", "b"], wanted, rates | {PartitionId(3): 20.0}) == wanted


def test_by_rate_there_may_be_nobody() -> None:
    assert assign_by_rate([PartitionId(1)], [], {}, {}) == {}
    assert assign_by_rate([], ["a"], {}, {}) == {}


@pytest.mark.parametrize("zone", ["", "a"])
def test_the_choice_looks_at_each_partition_a_few_times_however_many_members_there_are(zone: str) -> None:
    """Ten times the partitions and members are ten times the looks, from nothing and after a third vanished."""

    class Counted(Zones):
        looks = 0

        def is_home(self, partition: PartitionId, member: str) -> bool:
            """Count a look."""
            self.looks += 1
            return super().is_home(partition, member)

    for count in (30, 300):
        members = [f"m{number:03d}" for number in range(count)]
        partitions = [PartitionId(number) for number in range(1, 10 * count + 1)]
        homes = dict.fromkeys(partitions, zone), dict.fromkeys(members, zone)
        zones = Counted(*homes)
        owners = assign(partitions, members, {}, zones)
        assign(partitions, members[: count * 2 // 3], owners, zones)
        assert zones.looks <= 12 * len(partitions)
