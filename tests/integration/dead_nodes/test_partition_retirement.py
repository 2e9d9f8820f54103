"""Retiring partitions beside a node that does not answer."""

from __future__ import annotations

import pytest

from mqlayer.postgres.database import Database
from mqlayer.routes import partition_retirement, retire_partitions
from mqlayer.stack import RedisServer
from mqlayer.topics import rearm_node
from tests.fixtures.dead_nodes import known_group
from tests.proof.route_steps import move, split
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

pytestmark = pytest.mark.world(nodes=2)


def test_a_dead_node_with_more_to_retire_than_a_round_takes_starves_no_other(
    world: World, database: Database, node: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    move(runtime_of(database, world.key_prefix), "orders", 2, to="node-1")
    split(runtime_of(database, world.key_prefix), "orders", 3, at=[700])
    known_group(world, database, start="latest")
    monkeypatch.setattr(partition_retirement, "PER_ROUND", 1)
    node.kill()
    assert retire_partitions(runtime_of(database, world.key_prefix)) == [3]
    assert retire_partitions(runtime_of(database, world.key_prefix)) == []
    node.start()
    rearm_node(runtime_of(database, world.key_prefix), "node-2")
    assert retire_partitions(runtime_of(database, world.key_prefix)) == [2]
    assert world.rows("SELECT 1 FROM mqlayer.partition WHERE state = 'deleted' AND retired_at IS NULL") == []
