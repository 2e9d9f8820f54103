"""What a relay may record of topics with a durability class, and when."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from mqlayer.domain.routing import NodeId
from mqlayer.errors import StoreUnavailable
from mqlayer.redis.node_connection import Node
from mqlayer.relay.confirmations import Confirmations, Unconfirmed
from mqlayer.relay.lp_cursors import LpCursor, Target
from mqlayer.relay.relay_nodes import RelayNode


class Connection:
    """The append connection of a node."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def close(self) -> None:
        """Nothing is open."""


class Scene:
    """Two connected nodes, an executor whose answers the test gives, and what a sender noted."""

    def __init__(self) -> None:
        self.known = {NodeId(n): Node(NodeId(n), f"n{n}", f"redis://n{n}/0", "run", replicas=1) for n in (1, 2)}
        self.nodes: dict[int, RelayNode] = {}
        for node_id, node in self.known.items():
            connection: Any = Connection(node)
            self.nodes[node_id] = RelayNode(node_id, node.address, connection)
        self.unconfirmed: Unconfirmed = {}
        self.asked: list[tuple[Any, Future[dict[int, str]]]] = []
        scene: Any = self
        self.confirmations = Confirmations(scene, scene, self.unconfirmed, lambda: self.known, scene)

    def node(self, node_id: int) -> RelayNode:
        return self.nodes[node_id]

    def submit(self, _: Callable[..., dict[int, str]], key: Any, *__: Any) -> Future[dict[int, str]]:
        answer: Future[dict[int, str]] = Future()
        self.asked.append((key, answer))
        return answer

    def acked(self, cursor: LpCursor, seq: int) -> None:
        cursor.advance(seq)
        self.unconfirmed.setdefault(cursor.target, {})[cursor] = seq


def target(partition: int, node: int) -> Target:
    made = Target(partition, node, 0)
    made.durability = "replica"
    return made


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_what_was_acknowledged_behind_the_question_waits_for_the_next_one(scene: Scene) -> None:
    cursor = LpCursor(1, target(1, 1))
    scene.acked(cursor, 5)
    assert scene.confirmations.take() == {}
    scene.acked(cursor, 9)
    scene.asked[0][1].set_result({})
    assert scene.confirmations.take() == {cursor: 5}
    assert len(scene.asked) == 2
    scene.asked[1][1].set_result({})
    assert scene.confirmations.take() == {cursor: 9}
    assert not scene.unconfirmed
    assert not scene.confirmations.is_asking


@pytest.mark.parametrize("failure", ["0 of 1 replicas have it", StoreUnavailable("n1", "away")])
def test_a_wait_that_fails_confirms_nothing_and_is_repeated(scene: Scene, failure: Any) -> None:
    cursor = LpCursor(1, target(1, 1))
    scene.acked(cursor, 5)
    scene.confirmations.take()
    if isinstance(failure, str):
        scene.asked[0][1].set_result({1: failure})
    else:
        scene.asked[0][1].set_exception(failure)
    assert scene.confirmations.take() == {}
    assert len(scene.asked) == 2


def test_a_partition_that_lacks_something_holds_no_other_one_up(scene: Scene) -> None:
    cursor, other = LpCursor(1, target(1, 1)), LpCursor(2, target(2, 1))
    for one in (cursor, other):
        scene.acked(one, 5)
    scene.confirmations.take()
    scene.asked[0][1].set_result({1: "0 of 1 replicas have it"})
    assert scene.confirmations.take() == {other: 5}
    scene.asked[1][1].set_result({})
    assert scene.confirmations.take() == {cursor: 5}


def test_an_answer_behind_a_new_connection_or_a_rewind_counts_for_nothing(scene: Scene) -> None:
    cursor, other = LpCursor(1, target(1, 1)), LpCursor(2, target(2, 2))
    for one in (cursor, other):
        scene.acked(one, 5)
    scene.confirmations.take()
    again: Any = Connection(scene.known[NodeId(1)])
    scene.nodes[1].connection = again
    other.rewound_at = 7
    for _, answer in scene.asked:
        answer.set_result({})
    assert scene.confirmations.take() == {}
    assert len(scene.asked) == 4


def test_a_parent_is_confirmed_before_its_successor(scene: Scene) -> None:
    parent, successor = target(1, 1), target(2, 2)
    cursor = LpCursor(1, parent)
    scene.acked(cursor, 5)
    cursor.target = successor
    scene.acked(cursor, 9)
    scene.confirmations.take()
    (_, first), (_, second) = sorted(scene.asked, key=lambda one: one[0])
    second.set_result({})
    assert scene.confirmations.take() == {}
    first.set_result({})
    scene.asked[2][1].set_result({})
    assert max(scene.confirmations.take().values()) <= 9
    for _, answer in scene.asked[3:]:
        answer.set_result({})
    scene.confirmations.take()
    assert not scene.unconfirmed


def test_a_parent_on_a_node_that_is_away_holds_nothing_up(scene: Scene) -> None:
    cursor = LpCursor(1, target(1, 1))
    scene.acked(cursor, 5)
    scene.nodes[1].connection = None
    scene.confirmations.take()
    assert scene.unconfirmed
    cursor.target = target(2, 2)
    scene.acked(cursor, 9)
    scene.confirmations.take()
    assert [key[0] for key, _ in scene.asked] == [2]
    scene.asked[0][1].set_result({})
    assert scene.confirmations.take() == {cursor: 9}


def test_a_class_that_was_taken_back_holds_nothing_up(scene: Scene) -> None:
    cursor = LpCursor(1, target(1, 1))
    scene.acked(cursor, 5)
    cursor.target.durability = "node"
    assert scene.confirmations.take() == {cursor: 5}


def test_waits_that_fail_are_counted_and_the_delay_lasts_until_one_succeeds(scene: Scene) -> None:
    cursor, confirmations = LpCursor(1, target(1, 1)), scene.confirmations
    assert (confirmations.failed_waits(), confirmations.delays()) == ({}, {})
    scene.acked(cursor, 5)
    confirmations.take()
    assert confirmations.failed_waits() == {"replica": 0}
    seen = [confirmations.delays()["replica"]]
    for number in range(3):
        scene.asked[number][1].set_result({1: "0 of 1 replicas have it"})
        assert confirmations.take() == {}
        seen.append(confirmations.delays()["replica"])
    assert seen == sorted(seen)
    assert 0 < seen[0] < seen[-1]
    assert confirmations.failed_waits() == {"replica": 3}
    scene.asked[3][1].set_result({})
    confirmations.take()
    assert confirmations.delays() == {"replica": 0.0}
    assert confirmations.failed_waits() == {"replica": 3}
