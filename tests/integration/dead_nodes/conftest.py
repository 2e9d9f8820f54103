"""Two nodes of which the second goes away, and a topic on both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqlayer.postgres.database import Database
from mqlayer.stack import RedisServer
from tests.fixtures.servers import StartRedis
from tests.proof.outbox_world import OutboxWorld


@pytest.fixture
def node(start_redis: StartRedis) -> RedisServer:
    """The node that goes away: the second one."""
    return start_redis()


@pytest.fixture
def world(database_dsn: str, redis_url: str, node: RedisServer, key_prefix: str) -> OutboxWorld:
    """Two nodes, a topic of two partitions, one on each."""
    world = OutboxWorld(database_dsn, key_prefix, [redis_url, node.url])
    world.add_topic("orders", partitions=2)
    return world


@pytest.fixture
def database(world: OutboxWorld) -> Iterator[Database]:
    """The database: control and application in one."""
    with Database(world.dsn) as database:
        yield database
