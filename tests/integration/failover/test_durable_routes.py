"""A topic's durability class while its partitions change nodes: a repetition is confirmed where its first copy is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqlayer.domain.routing import Route
from mqlayer.errors import PublishUnknown, StoreUnavailable
from mqlayer.routes import apply_change, finish_changes, planned_move
from mqlayer.topics import set_durability, set_node_address, set_node_replicas
from tests.fixtures.failpoints import broken_off_at
from tests.fixtures.replicas import Pair, pair_of
from tests.fixtures.servers import StartRedis
from tests.proof.world import World


@pytest.fixture
def pair(start_redis: StartRedis) -> Iterator[Pair]:
    """The first node and its replica."""
    with pair_of(start_redis) as pair:
        yield pair


@pytest.fixture
def world(pair: Pair, start_redis: StartRedis, database_dsn: str, key_prefix: str) -> World:
    """A topic that waits for a replica, with its partition on the first of two nodes."""
    other = start_redis(options={"repl-diskless-sync-delay": "0"})
    start_redis(options={"replicaof": f"127.0.0.1 {other.port}"})
    world = World(database_dsn, key_prefix, [pair.primary.url])
    world.add_topic("safe", partitions=1)
    world.add_node(other.url)
    for node in ("node-1", "node-2"):
        assert set_node_replicas(world.runtime(), node, 1)
    assert set_durability(world.runtime(), "safe", "replica")
    return world


def move(world: World) -> Route:
    """Move the topic's partition to the other node."""
    return apply_change(world.runtime(), planned_move(world.database, "safe", 1, to="node-2"))


def states(world: World) -> list[tuple[str, str]]:
    """Return the state of the change, and of the partition that it ends."""
    return world.rows(
        "SELECT c.state, p.state FROM mqlayer.route_change c "
        "JOIN mqlayer.partition p ON p.ended_by_change = c.change_id"
    )


def test_a_partition_moves_once_its_replica_has_what_it_holds(world: World, pair: Pair) -> None:
    """The new node's replica confirms the repetition, and never had the message."""
    with world.producer() as producer:
        producer.send("safe", key="k", body=b"first")
        pair.wait_in_step()
        pair.cut_connection()
        with pytest.raises(PublishUnknown, match="0 of 1 replicas have it") as caught:
            producer.send("safe", key="k", body=b"second", timeout_s=3)
        with pytest.raises(StoreUnavailable, match=r"durability replica: .*0 of 1 replicas have it") as refused:
            move(world)
        assert "mqlayer topic set safe --durability node" in str(refused.value)
        assert states(world) == [("planned", "open")], "publishers must not wait for the replica"
        future = caught.value.future
        assert future is not None
        assert not future.done()
        pair.heal_connection()
        pair.wait_in_step()
        assert finish_changes(world.runtime(), topic="safe") == {1: "done"}
        assert future.result(20).identity.seq == 2
    pair.primary.erase()
    pair.promote()
    set_node_address(world.runtime(), "node-1", pair.replica.url)
    world.urls = [pair.replica.url, world.urls[1]]
    assert [record.value for record in world.records() if record.value] == ["first", "second"]


@pytest.mark.full
def test_a_replica_that_goes_behind_the_seal_is_waited_for(world: World, pair: Pair) -> None:
    """Until the class is held again, or lowered."""
    world.publish(1, topic="safe")
    with broken_off_at("change.after_seal"):
        move(world)
    pair.cut_connection()
    with world.client() as client:
        # Something that the replica lacks for certain.
        client.set("lacking", "x")
    assert "0 of 1 replicas have it" in finish_changes(world.runtime())[1]
    assert states(world) == [("sealing", "open")]
    assert set_durability(world.runtime(), "safe", "node")
    assert finish_changes(world.runtime()) == {1: "done"}
