"""What a producer keeps of sources that its queues left."""

from __future__ import annotations

from typing import Any

import pytest

from mqlayer.domain.routing import LpRange, NodeId, PartitionId, Route, RouteVersion
from mqlayer.logs import event_of
from mqlayer.producing.losses import FormerSources
from mqlayer.producing.send_queues import LpQueue, PartitionQueue, TopicQueues


@pytest.fixture
def queue() -> LpQueue:
    """LP 3 of the topic orders, under source 1."""
    link: Any = None
    route = Route(1, "orders", RouteVersion(1), (LpRange(0, 1024, PartitionId(1), NodeId(1)),), 1_000, 0)
    return TopicQueues(route, [PartitionQueue(1, link, 0)] * 1024, 0.0).queue_of(3, 1)


def leave(former: FormerSources, queue: LpQueue, acked: int) -> None:
    """Have a queue go on under the next source."""
    former.add(queue, acked)
    queue.restart((queue.source or 0) + 1)


def test_what_is_lost_is_told_once_and_only_the_rest_is_kept(queue: LpQueue) -> None:
    former = FormerSources(10)
    leave(former, queue, 8)
    assert [former.lower(queue, 1, mark) for mark in (9, 8, 5, 5, 0, 0)] == [8, 8, 8, 5, 5, 0]
    assert not list(former)


def test_nothing_is_kept_of_a_source_under_which_nothing_is_left(queue: LpQueue) -> None:
    former = FormerSources(10)
    leave(former, queue, 0)
    assert not list(former)


def test_beyond_the_limit_the_oldest_is_forgotten_and_named(queue: LpQueue, caplog: pytest.LogCaptureFixture) -> None:
    former = FormerSources(2)
    for acked in (8, 5, 3):
        leave(former, queue, acked)
    assert list(former) == [(queue, 2, 5), (queue, 3, 3)]
    (record,) = caplog.records
    facts: Any = record
    assert (event_of(record), facts.topic, facts.lp, facts.source) == ("former_source_forgotten", "orders", 3, 1)
    assert facts.messages == 8
