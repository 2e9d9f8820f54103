"""An outbox is numbered anew while another relay is at work on it, or it is a copy (TRAPS 2h)."""

from __future__ import annotations

import pytest

from mqlayer.errors import ConfigurationRefused
from mqlayer.postgres.database import Database
from mqlayer.relay import recover_now, relay_once
from mqlayer.stack import RedisServer
from tests.fixtures.servers import StartRedis
from tests.fixtures.waiting import wait_until
from tests.proof.outbox_world import QUICK, OutboxWorld, relayed_world


@pytest.fixture
def node(start_redis: StartRedis) -> RedisServer:
    """A Redis of the test's own."""
    return start_redis()


def test_a_relay_at_work_notices_that_another_one_numbered_the_outbox_anew(
    database_dsn: str, node: RedisServer, key_prefix: str
) -> None:
    """It has lost nothing itself and knows old numbers: by these it would pass the new ones over."""
    world = OutboxWorld(database_dsn, key_prefix, [node.url])
    world.add_topic("orders", partitions=2)
    with world.relay() as relay, Database(database_dsn) as database:
        world.publish(40, keys=10)
        world.wait_until_whole()
        wait_until(
            lambda: world.rows("SELECT sum(seq) FROM mqlayer_app.relayed") == [(40,)], what="its progress recorded"
        )
        before = world.rows("SELECT outbox_uuid FROM mqlayer_app.identity")
        # Another relay saw that commits are missing in an LP of its own; as a rule that one is first to see to it.
        world.rows("UPDATE mqlayer_app.identity SET timeline = -1")
        recover_now(database, database, world.settings())
        assert world.rows("SELECT outbox_uuid FROM mqlayer_app.identity") != before
        world.publish(60, keys=10, tag="new")
        wait_until(lambda: len(list(world.records())) == 100, timeout_s=10, what="what is new to arrive")
        wait_until(lambda: relay.health().ready, what="the relay to be ready")
    found: dict[str | None, list[str]] = {}
    for record in world.records():
        found.setdefault(record.key, []).append(record.value)
    assert found == {
        f"key-{key}": [f"{tag}-{number}" for tag, count in (("m", 40), ("new", 60)) for number in range(key, count, 10)]
        for key in range(10)
    }


def test_a_copy_on_another_server_does_not_take_the_place_of_its_original(
    database_dsn: str, node: RedisServer, key_prefix: str
) -> None:
    """It is on another timeline too, as a rule: that must not hide that it is a copy, nor end the original's source."""
    world = relayed_world(database_dsn, key_prefix, node.url, count=5, keys=5)
    world.rows("UPDATE mqlayer.source SET cluster = '1/elsewhere'")
    world.rows("UPDATE mqlayer_app.identity SET timeline = 77")
    with pytest.raises(ConfigurationRefused, match="outbox adopt"):
        relay_once(world.settings(), limits=QUICK)
    with Database(database_dsn) as database, pytest.raises(ConfigurationRefused, match="outbox adopt"):
        recover_now(database, database, world.settings())
    assert world.rows("SELECT count(*) FROM mqlayer.source WHERE closed_at IS NULL") == [(1,)]
