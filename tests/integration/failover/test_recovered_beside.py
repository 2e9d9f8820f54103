"""An outbox is numbered anew while another relay is at work on it, or it is a copy (TRAPS 2h)."""

from __future__ import annotations

import signal

import pytest
import redis

from mqlayer.changes import split
from mqlayer.errors import ConfigurationRefused
from mqlayer.postgres.database import Database
from mqlayer.redis.keys import ended_key, partition_keys
from mqlayer.relay import recover_now, relay_once
from mqlayer.stack import RedisServer
from mqlayer.topics import rearm_node
from tests.chaos.harness.play import is_stopped
from tests.fixtures.servers import StartRedis
from tests.fixtures.waiting import wait_until
from tests.integration.failover.test_lost_commits import expected, recovered, values
from tests.proof.hand import Hand
from tests.proof.outbox_world import QUICK, OutboxWorld, relayed_world

ENDED = "SELECT count(*)::int FROM mqlayer.source WHERE closed_at IS NOT NULL"


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
    assert values(world) == expected(10, ("m", 40), ("new", 60))


@pytest.mark.parametrize("emptied", [False, True], ids=["as it is", "emptied beside it"])
def test_what_a_relay_has_read_of_the_old_numbers_is_not_there_twice(
    database_dsn: str, node: RedisServer, key_prefix: str, emptied: bool
) -> None:
    """It stands still between its look at the outbox and its append, while another one numbers that anew.

    By its chain the node would take the messages once more, under their old numbers and behind newer ones; where it is
    emptied meanwhile, those that begin a chain.
    """
    world = OutboxWorld(database_dsn, key_prefix, [node.url])
    world.add_topic("orders", partitions=2)
    before = [] if emptied else [("m", 20)]
    for tag, count in before:
        world.publish(count, keys=4, tag=tag)
        relay_once(world.settings(), limits=QUICK)
    world.publish(20, keys=4, tag="read")
    with world.relay_process(failpoints="relay.before_append=stop") as process, Database(database_dsn) as database:
        wait_until(lambda: is_stopped(process), timeout_s=30, what="the relay at its append")
        if emptied:
            # What is ended is a node's own knowledge: whoever arms it says it again.
            with world.relay():
                world.rows("UPDATE mqlayer_app.identity SET timeline = -1")
                wait_until(lambda: world.rows(ENDED) == [(1,)], timeout_s=30, what="the source ended")
            with redis.Redis.from_url(node.url) as client:
                client.flushall()
            rearm_node(database, "node-1", prefix=key_prefix, application=database)
        else:
            world.rows("UPDATE mqlayer_app.identity SET timeline = -1")
            assert recover_now(database, database, world.settings()) is not None
        world.publish(20, keys=4, tag="new")
        with world.relay():
            wait_until(lambda: counted(world, "new") == 20, timeout_s=30, what="what is new to arrive")
            process.send_signal(signal.SIGCONT)
            world.publish(20, keys=4, tag="after")
            wait_until(lambda: counted(world, "after") == 20, timeout_s=30, what="what comes after it")
        process.terminate()
        assert process.wait(30) == 0
    assert values(world) == expected(4, *before, ("read", 20), ("new", 20), ("after", 20))


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


def test_what_a_sealed_partition_lost_comes_again_under_a_source_that_is_about_to_end(
    database_dsn: str, node: RedisServer, key_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Who began to recover the outbox died, and the node lost some: nobody could arm it if it refused that source."""
    world = relayed_world(database_dsn, key_prefix, node.url, count=40, keys=10)
    with Database(database_dsn) as database:
        hand = Hand(database, key_prefix, "orders")
        split(database, "orders", 1, prefix=key_prefix, application=database)
        world.rows("UPDATE mqlayer_app.identity SET timeline = -1")
        with world.relay_process(failpoints="recover.after_end=kill") as process:
            assert process.wait(timeout=30) == -signal.SIGKILL
        with redis.Redis.from_url(node.url) as client:
            assert client.smembers(ended_key(key_prefix).decode())
            client.delete(*partition_keys(key_prefix, 1))
        node.kill()
        node.start()
        with world.relay():
            wait_until(lambda: recovered(world), timeout_s=30, what="the outbox to be recovered")
            world.publish(20, keys=10, tag="new")
            wait_until(lambda: counted(world, "new") == 20, timeout_s=30, what="what is new to arrive")
        hand.consume_all()
    assert hand.bodies() == expected(10, ("m", 40), ("new", 20))
    assert "messages_lost" not in caplog.text


def counted(world: OutboxWorld, tag: str) -> int:
    """Return how many messages with a tag are in the partitions."""
    return sum(value.startswith(f"{tag}-") for of_key in values(world).values() for value in of_key)
