"""The relay and partitions that refuse: it asks for the route, waits where there is none yet, and keeps the order."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from mqlayer.redis.keys import partition_keys
from tests.fixtures.wait import wait_until
from tests.proof.world import World


@pytest.mark.parametrize("state", ["sealed", "importing"])
def test_a_partition_that_is_not_open_has_its_lps_wait_and_goes_on_in_order(world: World, state: str) -> None:
    with redis.Redis.from_url(world.urls[0]) as client, world.relay():
        meta = partition_keys(world.key_prefix, 1).meta
        world.publish(60)
        world.wait_until_whole()
        client.hset(meta, mapping={"state": state, "change": "7"})
        world.publish(60, tag="while")
        wait_until(lambda: relayed(world, 512) == published(world, 512), what="the other partition to go on")
        assert relayed(world, 0) < published(world, 0)
        client.hset(meta, mapping={"state": "open", "change": ""})
        world.wait_until_whole()


def test_lps_that_moved_to_another_partition_are_followed_there(world: World) -> None:
    with world.relay():
        world.publish(60)
        world.wait_until_whole()
        for version, (partition, successor) in enumerate([(1, 3), (2, 4), (3, 5)], start=2):
            world.publish(60, tag=f"before-{version}")
            move(world, partition=partition, successor=successor, version=version)
            world.publish(60, tag=f"after-{version}")
            world.wait_until_whole()
    assert {record.partition for record in world.records()} == {1, 2, 3, 4, 5}


def move(world: World, *, partition: int, successor: int, version: int) -> None:
    """Do what a route change does, the short way: seal, hand the marks over, open, put the version in force."""
    ((lp_from, lp_to),) = world.rows("SELECT lp_from, lp_to FROM mqlayer.partition WHERE partition_id = %s", partition)
    world.rows(
        "INSERT INTO mqlayer.partition (topic_id, node_id, lp_from, lp_to, state) VALUES (1, 1, %s, %s, 'open')",
        lp_from, lp_to,
    )  # fmt: skip
    with redis.Redis.from_url(world.urls[0]) as client:
        old, new = partition_keys(world.key_prefix, partition), partition_keys(world.key_prefix, successor)
        client.hset(old.meta, mapping={"state": "sealed", "change": str(version)})
        marks: dict[Any, Any] = client.hgetall(old.marks)
        if marks:
            client.hset(new.marks, mapping=marks)
        facts = {"state": "open", "topic": "orders", "lp_from": lp_from, "lp_to": lp_to, "change": "", "next": 1}
        client.hset(new.meta, mapping=facts)
    world.rows(
        "WITH put AS (INSERT INTO mqlayer.route (topic_id, version, lp_from, lp_to, partition_id) "
        "SELECT topic_id, version + 1, lp_from, lp_to, CASE WHEN partition_id = %s THEN %s ELSE partition_id END "
        "FROM mqlayer.route WHERE topic_id = 1 AND version = %s) "
        "UPDATE mqlayer.topic SET version = version + 1 WHERE topic_id = 1",
        partition, successor, version - 1,
    )  # fmt: skip


def relayed(world: World, lp_from: int) -> int:
    return sum(len(chain) for (_, lp), chain in world.relayed().items() if lp_from <= lp < lp_from + 512)


def published(world: World, lp_from: int) -> int:
    return sum(len(chain) for (_, lp), chain in world.published().items() if lp_from <= lp < lp_from + 512)
