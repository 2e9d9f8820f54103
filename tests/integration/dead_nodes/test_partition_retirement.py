"""Retiring partitions beside a node that does not answer."""

from __future__ import annotations

import pytest

from mqlayer.postgres.database import Database
from mqlayer.routes import move, partition_retirement, retire_partitions, split
from mqlayer.stack import RedisServer
from mqlayer.topics import rearm_node
from tests.fixtures.dead_nodes import consuming
from tests.proof.outbox_world import OutboxWorld


def test_a_dead_node_with_more_to_retire_than_a_round_takes_starves_no_other(
    world: OutboxWorld, database: Database, node: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    move(database, "orders", 2, prefix=world.key_prefix, to="node-1")
    split(database, "orders", 3, at=[700], prefix=world.key_prefix)
    with consuming(world, start="latest"):
        pass
    monkeypatch.setattr(partition_retirement, "PER_ROUND", 1)
    node.kill()
    assert retire_partitions(database, prefix=world.key_prefix) == [3]
    assert retire_partitions(database, prefix=world.key_prefix) == []
    node.start()
    rearm_node(database, "node-2", prefix=world.key_prefix)
    assert retire_partitions(database, prefix=world.key_prefix) == [2]
    assert world.rows("SELECT 1 FROM mqlayer.partition WHERE state = 'deleted' AND retired_at IS NULL") == []
