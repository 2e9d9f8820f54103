"""Deployments: each partition's member is of its deployment, and what is taken back is as before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqlayer.domain.assignment import assign
from mqlayer.domain.deployments import Deployments, assign_each
from mqlayer.domain.routing import LP_COUNT, PartitionId
from mqlayer.errors import Conflict, InvalidInput

NAMES = st.sampled_from(["blue", "green"])
PARTITIONS = st.dictionaries(st.integers(1, 30).map(PartitionId), st.none() | NAMES)
MEMBERS = st.dictionaries(st.sampled_from([f"m{number}" for number in range(8)]), NAMES)


@given(PARTITIONS, MEMBERS, st.data())
def test_a_partition_has_a_member_of_its_deployment_or_none(
    partitions: dict[PartitionId, str | None], members: dict[str, str], data: st.DataObject
) -> None:
    """Balanced within each; who keeps a partition may have it; and nothing moves the second time."""
    anyone = st.sampled_from([*members, "gone"])
    given = st.dictionaries(st.sampled_from(list(partitions)), anyone) if partitions else st.just({})
    owners, targets = data.draw(given), data.draw(given)
    found = assign_each(partitions, members, owners, targets, assign)
    for partition, deployment in partitions.items():
        able = [member for member, of in members.items() if deployment in (None, of)]
        assert (partition in found) == bool(able)
        assert not able or found[partition] in able
    for deployment in {of for of in partitions.values() if of is not None}:
        mine = [partition for partition, of in partitions.items() if of == deployment]
        counts = [
            sum(found[partition] == member for partition in mine) for member, of in members.items() if of == deployment
        ]
        assert not counts or max(counts) - min(counts) <= 1
    assert assign_each(partitions, members, found, {}, assign) == found


def test_an_owner_keeps_what_it_was_to_give_to_a_member_that_may_not_have_it_any_more() -> None:
    """Taken back in the middle of a switch: blue's owners go on, instead of changing places."""
    partitions = {PartitionId(number): "blue" for number in (1, 2, 3, 4)}
    members = {"b1": "blue", "b2": "blue", "g1": "green"}
    owners = {PartitionId(1): "b2", PartitionId(2): "b2", PartitionId(3): "b1", PartitionId(4): "b1"}
    targets = dict.fromkeys(owners, "g1")
    assert assign_each(partitions, members, owners, targets, assign) == owners


@given(st.integers(1, LP_COUNT - 1), st.integers(0, LP_COUNT - 1))
def test_a_canary_gets_what_begins_below_its_bound(lps: int, lp_from: int) -> None:
    some = Deployments("blue").with_canary("green", lps)
    assert some.of(lp_from) == ("green" if lp_from < lps else "blue")
    assert some.back() == Deployments("blue")
    assert some.switched("green").of(lp_from) == "green"
    assert some.switched("green").back() == Deployments("blue")
    assert some.switched("blue").of(lp_from) == "blue"


def test_the_group_falls_back_once_and_only_to_members_that_live() -> None:
    both, whole = (
        Deployments("blue").with_canary("green", 100, fallback=True),
        Deployments("blue").switched("green", fallback=True),
    )
    for now in (both, whole):
        assert now.fallen_back(["green", "blue"]) is None
        assert now.fallen_back([]) is None
        assert now.fallen_back(["blue"]) == Deployments("blue")
    assert Deployments("blue").switched("green").fallen_back(["blue"]) is None
    assert Deployments("blue", fallback=True).fallen_back(["green"]) is None


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(Conflict, match="is in force"):
        Deployments("blue").with_canary("blue", 5)
    with pytest.raises(InvalidInput, match="no partition"):
        Deployments("blue").with_canary("green", 0)
    with pytest.raises(Conflict, match="--to DEPLOYMENT"):
        Deployments("blue").back()
    assert Deployments("blue").with_canary("green", LP_COUNT) == Deployments("blue").switched("green")
