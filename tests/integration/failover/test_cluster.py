"""A node that is a Redis Cluster: partitions lie on all shards, and shards fail over and pass slots on."""

from __future__ import annotations

from contextlib import closing

from mqlayer.producing import Message, Producer
from tests.fixtures.clusters import Cluster, StartCluster
from tests.proof.world import World


def test_a_relay_fills_partitions_on_all_shards(shared_cluster: Cluster, database_dsn: str, key_prefix: str) -> None:
    world = World(database_dsn, key_prefix, [shared_cluster.url])
    world.add_topic("orders", partitions=6)
    partitions = [partition for _, partition, _ in world.partitions()]
    assert len({shared_cluster.owner(partition).port for partition in partitions}) == 3
    with world.relay():
        world.publish(60)
        world.wait_until_whole()


def test_a_relay_follows_a_shard_that_fails_over(
    start_cluster: StartCluster, database_dsn: str, key_prefix: str
) -> None:
    cluster = start_cluster()
    world = World(database_dsn, key_prefix, [cluster.url])
    world.add_topic("orders", partitions=6)
    with world.relay():
        world.publish(60)
        world.wait_until_whole()
        cluster.kill(cluster.owner(1))
        world.publish(60, tag="after")
        cluster.wait_ok()
        world.urls = [cluster.url]
        world.wait_until_whole(timeout_s=40)
