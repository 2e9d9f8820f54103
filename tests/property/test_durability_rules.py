"""How many replicas a class waits for, and what a reply says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqlayer.domain.durability import replicas_wanted
from mqlayer.domain.routing import NodeId
from mqlayer.redis.durability import NO_WAIT, DurabilityWait
from mqlayer.redis.node_connection import Node

REPLICAS = st.integers(1, 100)


def node(replicas: int) -> Node:
    return Node(NodeId(1), "n", "redis://h/0", "run", replicas=replicas)


@given(REPLICAS)
def test_a_quorum_is_most_of_the_servers_and_no_more_than_needed(replicas: int) -> None:
    with_primary = replicas_wanted("quorum", replicas) + 1
    assert 2 * with_primary > replicas + 1
    assert with_primary == 2 or 2 * (with_primary - 1) <= replicas + 1
    assert replicas_wanted("replica", replicas) == 1


@given(REPLICAS)
def test_the_default_class_adds_nothing(replicas: int) -> None:
    assert DurabilityWait.of("node", node(replicas)).replies == NO_WAIT.replies == 0


@pytest.mark.parametrize(
    ("durability", "replies", "held"),
    [
        ("replica", [[b"ok"], 1], True),
        ("replica", [[b"ok"], 0], False),
        ("quorum", [[b"ok"], 1], False),
        ("quorum", [[b"ok"], 2], True),
        ("disk", [[b"ok"], [1, 0]], True),
        ("disk", [[b"ok"], [0, 0]], False),
        # A wait behind a touch that wrote nothing waits for nothing.
        ("replica", [[b"absent"], 3], False),
        ("disk", [ValueError("NOSCRIPT"), [1, 0]], False),
        ("disk", [[b"ok"], ValueError("unknown command")], False),
    ],
)
def test_a_class_is_held_by_its_replies_alone(durability: Any, replies: list[Any], held: bool) -> None:
    wait = DurabilityWait.of(durability, node(3))
    assert wait.replies == len(replies)
    assert (wait.lack(replies) == "") is held


class Digests:
    """What names scripts."""

    def script(self, name: str, keys: tuple[bytes, ...]) -> tuple[Any, ...]:
        return (b"EVALSHA", name.encode(), len(keys), *keys)


@given(st.integers(1, 50))
def test_partitions_of_one_server_share_a_wait(count: int) -> None:
    """Else a replica that is away would delay them by a second each."""
    connection: Any = Digests()
    packets = DurabilityWait.of("replica", node(1)).shared_packets(connection, "mq", range(count))
    assert [b"WAIT" in packet for packet in packets] == [False] * count + [True]


def test_a_partition_that_was_not_touched_is_not_confirmed_by_the_wait_of_others() -> None:
    wait = DurabilityWait.of("replica", node(1))
    assert wait.shared_lacks([[b"ok"], [b"ok"], 1], [7, 8]) == {}
    assert set(wait.shared_lacks([[b"ok"], [b"ok"], 0], [7, 8])) == {7, 8}
    assert set(wait.shared_lacks([[b"ok"], ValueError("MOVED 1 h:1"), 1], [7, 8])) == {8}
