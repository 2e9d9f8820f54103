"""What a producer keeps of sources that its lanes left."""

from __future__ import annotations

from typing import Any

import pytest

from mqlayer.domain.routing import NodeId, PartitionId, Range, Route, RouteVersion
from mqlayer.producing.lanes import Lane, Slot, TopicLanes
from mqlayer.producing.losses import FormerSources


@pytest.fixture
def lane() -> Lane:
    """LP 3 of the topic orders, under source 1."""
    link: Any = None
    route = Route(1, "orders", RouteVersion(1), (Range(0, 1024, PartitionId(1), NodeId(1)),), 1_000, 0)
    return TopicLanes(route, [Slot(1, link, 0)] * 1024, 0.0).lane(3, 1)


def leave(former: FormerSources, lane: Lane, acked: int) -> None:
    """Have a lane go on under the next source."""
    former.add(lane, acked)
    lane.restart((lane.source or 0) + 1)


def test_what_is_lost_is_told_once_and_only_the_rest_is_kept(lane: Lane) -> None:
    former = FormerSources(10)
    leave(former, lane, 8)
    assert [former.lower(lane, 1, mark) for mark in (9, 8, 5, 5, 0, 0)] == [8, 8, 8, 5, 5, 0]
    assert not list(former)


def test_nothing_is_kept_of_a_source_under_which_nothing_is_left(lane: Lane) -> None:
    former = FormerSources(10)
    leave(former, lane, 0)
    assert not list(former)


def test_beyond_the_limit_the_oldest_is_forgotten_and_named(lane: Lane, caplog: pytest.LogCaptureFixture) -> None:
    former = FormerSources(2)
    for acked in (8, 5, 3):
        leave(former, lane, acked)
    assert list(former) == [(lane, 2, 5), (lane, 3, 3)]
    (record,) = caplog.records
    facts: Any = record
    assert (record.message, facts.topic, facts.lp, facts.source) == ("former_source_forgotten", "orders", 3, 1)
    assert facts.messages == 8
