"""Durability classes as operators set them, and what the default costs: nothing."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import redis

from mqlayer.errors import ConfigurationRefused, Conflict, InvalidInput
from mqlayer.producing import Message
from mqlayer.relay import relay_once
from mqlayer.topics import find_node, register_node, set_durability, set_node_replicas
from tests.fixtures.commands import Commands
from tests.fixtures.wait import wait_until
from tests.proof.world import QUICK, World

WAITS = {"wait", "waitaof"}


def calls(world: World, *, reset: bool = True) -> dict[str, int]:
    """Return how often each command ran since the last reset; MONITOR would count the same."""
    with world.client() as client:
        stats: dict[str, Any] = client.info("commandstats")
        if reset:
            client.config_resetstat()
    return {name.removeprefix("cmdstat_"): entry["calls"] for name, entry in stats.items()}


def confirms_early(client: redis.Redis) -> bool:
    """Whether a server that syncs each second confirms three syncs in half of one, measured."""
    began = time.monotonic()
    for number in range(3):
        client.set("synced", number)
        assert client.waitaof(1, 0, 5_000) == [1, 0]
    return time.monotonic() - began < 0.5


@pytest.mark.world(own_node=True, partitions=1)
def test_a_topic_without_a_class_sends_one_command_per_batch(world: World) -> None:
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"x")
        calls(world)
        for _ in range(5):
            producer.send("orders", key="k", body=b"x")
        assert {name: count for name, count in calls(world).items() if name in {"evalsha", *WAITS}} == {"evalsha": 5}
        # Its append is the control: with a class there are a touch and a wait more.
        set_node_replicas(world.runtime(), "node-1", 1)
        set_durability(world.runtime(), "orders", "replica")
    with world.producer(close_within_s=0.1, options={"replica_timeout_s": 0.05, "replicas": 1}) as producer:
        producer.send_oneway("orders", key="k", body=b"x")
        found = wait_until(
            lambda: told if (told := calls(world, reset=False)).get("wait") else None, what="a wait for the replica"
        )
        assert found is not None
        assert found["evalsha"] >= 2 * found["wait"]


@pytest.mark.world(own_node=True, partitions=1)
def test_a_relay_of_topics_without_a_class_waits_for_nothing(world: World) -> None:
    world.publish(50)
    calls(world)
    assert relay_once(world.settings(), limits=QUICK) == 50
    assert not WAITS & calls(world).keys()


@pytest.mark.world(partitions=1)
def test_a_class_that_a_node_can_not_hold_is_refused_by_its_name(world: World) -> None:
    with pytest.raises(ConfigurationRefused, match="node 'node-1' has no replica, and durability quorum waits for one"):
        set_durability(world.runtime(), "orders", "quorum")
    with pytest.raises(InvalidInput, match="node, disk, replica, quorum, not 'memory'"):
        set_durability(world.runtime(), "orders", "memory")  # type: ignore[arg-type]


@pytest.mark.world(own_node=True, partitions=1)
def test_disk_needs_a_server_that_tells_of_its_syncs(world: World) -> None:
    with world.client() as client:
        facts: dict[str, Any] = client.info("server")
        version = tuple(map(int, facts["redis_version"].split(".")[:2]))
        if version < (7, 2):
            with pytest.raises(ConfigurationRefused, match=rf"this is Redis {facts['redis_version']}, .* no WAITAOF"):
                set_durability(world.runtime(), "orders", "disk")
            return
        client.config_set("appendfsync", "no")
        with pytest.raises(ConfigurationRefused, match="appendfsync"):
            set_durability(world.runtime(), "orders", "disk")
        client.config_set("appendfsync", "everysec")
        if confirms_early(client):
            with pytest.raises(ConfigurationRefused, match=r"'everysec', .* this server confirms a sync before it"):
                set_durability(world.runtime(), "orders", "disk")
            client.config_set("appendfsync", "always")
    assert set_durability(world.runtime(), "orders", "disk")
    with world.producer() as producer:
        receipts = producer.send_many("orders", [Message("k", b"%d" % n) for n in range(3)])
        assert [receipt.identity.seq for receipt in receipts] == [1, 2, 3]
    world.publish(3)
    assert relay_once(world.settings(), limits=QUICK) == 3
    assert world.rows("SELECT sum(seq)::int FROM mqlayer_app.relayed") == [(3,)]


@pytest.mark.world(partitions=1)
def test_replicas_that_a_topic_waits_for_are_not_declared_away(world: World) -> None:
    runtime = world.runtime()
    assert set_node_replicas(runtime, "node-1", 2)
    assert not set_node_replicas(runtime, "node-1", 2)
    assert set_durability(runtime, "orders", "replica")
    assert not set_durability(runtime, "orders", "replica")
    with pytest.raises(Conflict, match="topics on node 'node-1' wait for a replica: orders"):
        set_node_replicas(runtime, "node-1", 0)
    with pytest.raises(InvalidInput, match="0 to 100 replicas"):
        set_node_replicas(runtime, "node-1", 101)
    assert find_node(world.database, "node-1").replicas == 2
    register_node(runtime, name="node-1", url=world.urls[0])
    assert find_node(world.database, "node-1").replicas == 2


@pytest.mark.world(partitions=0, by_commands=True)
def test_commands_set_and_show_it(world: World, run: Commands) -> None:
    refused = run("topic", "create", "safe", "--durability", "replica")
    assert refused.exit_code != 0
    assert run.lines("topic", "list") == []
    assert run.text("node", "set", "node-1", "--replicas", "1").strip() == "node-1 has 1 replica"
    run.text("topic", "create", "safe", "--partitions", "1", "--durability", "replica")
    assert [line["durability"] for line in run.lines("topic", "list")] == ["replica"]
    assert "durability" in run.text("topic", "show", "safe")
    assert "as before" in run.text("topic", "set", "safe", "--durability", "replica")
    lines = map(json.loads, run("doctor", "--json").stdout.splitlines())
    (found,) = [line for line in lines if line["check"] == "durable_topics"]
    assert found["seen"] == "topic safe waits for replica: 0 of 1 replicas are connected"
    assert run.lines("node", "list")[0]["replicas"] == 1
