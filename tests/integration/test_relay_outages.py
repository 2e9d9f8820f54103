"""The relay and stores that are away, slow, cut off, or that fell back: it waits, says so, and loses nothing."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import redis
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from mqlayer import failpoints
from mqlayer.logs import event_of
from mqlayer.outbox import list_quarantined
from mqlayer.postgres.migrations import migrate
from mqlayer.relay import relay_once
from mqlayer.stack import RedisServer
from mqlayer.topics import register_node
from tests.fixtures.servers import StartPostgres, StartRedis
from tests.fixtures.wait import awake_s, wait_until
from tests.proof.partition_values import fall_back, remove_partitions, snapshot
from tests.proof.proxy import TcpProxy
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World

pytestmark = pytest.mark.world(own_node=True)


@pytest.fixture
def connection(database_dsn: str) -> Iterator[TcpProxy]:
    """A connection to Postgres that can be cut."""
    parts = conninfo_to_dict(database_dsn)
    with TcpProxy(str(parts["host"]), int(str(parts["port"]))) as proxy:
        yield proxy


def says(caplog: pytest.LogCaptureFixture, event: str) -> bool:
    """Say whether an event was logged."""
    return event in [event_of(record) for record in caplog.records]


def bodies(world: World, tag: str) -> list[str]:
    """Return what the partitions hold of a tag."""
    return [body for chain in world.relayed().values() for _, _, body in chain if body.startswith(tag)]


def through(dsn: str, proxy: TcpProxy) -> str:
    """Return a DSN that takes the line."""
    return make_conninfo(dsn, host=proxy.host, port=proxy.port, password="secret-of-the-test")


def test_a_node_that_is_killed_and_restarts_is_armed_again_and_nothing_is_lost(world: World, node: RedisServer) -> None:
    with world.relay():
        world.publish(50)
        world.wait_until_whole()
        node.kill()
        world.publish(50, tag="while-away")
        node.start()
        world.wait_until_whole()


def test_a_node_that_lost_everything_gets_it_again_from_the_outbox(world: World, node: RedisServer) -> None:
    with world.relay():
        world.publish(50)
        world.wait_until_whole()
        with redis.Redis.from_url(node.url) as client:
            client.flushall()
        # No traffic: the comparison of marks notices.
        world.wait_until_whole()
        world.publish(50, tag="after")
        world.wait_until_whole()


def test_a_node_that_fell_back_gets_the_rest_again_without_traffic(world: World, node: RedisServer) -> None:
    with world.relay(), redis.Redis.from_url(node.url) as client:
        world.publish(40)
        world.wait_until_whole()
        keys = list(client.scan_iter(f"{world.key_prefix}:*"))
        before = {key: client.dump(key) for key in keys}
        world.publish(40, tag="lost")
        world.wait_until_whole()
        with client.pipeline(transaction=True) as pipeline:
            for key, value in before.items():
                pipeline.restore(key, 0, value, replace=True)
            pipeline.execute()
        world.wait_until_whole()
    assert world.rows("SELECT sum(seq)::int FROM mqlayer_app.relayed") == [(80,)]


@pytest.mark.full
def test_marks_of_a_partition_that_is_not_there_are_not_taken_for_rows_that_are_gone(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A node is emptied, the outbox rotated, and arming takes a while: marks come back, and nothing is missing."""
    with world.relay():
        world.publish(50)
        world.wait_until_whole()
        before = snapshot(world)
        world.rows("DELETE FROM mqlayer_app.outbox")
        with world.database.connection() as arming, arming.transaction():
            # Nobody arms the node meanwhile.
            arming.execute("SELECT 1 FROM mqlayer.node FOR UPDATE")
            remove_partitions(world)
            wait_until(
                lambda: says(caplog, "relay_node_away") or list_quarantined(world.database), what="the relay misses it"
            )
            fall_back(world, before)
        world.publish(20, tag="later")
        later = [f"later-{number}" for number in range(20)]
        wait_until(lambda: sorted(later) == sorted(bodies(world, "later")), what="all that came later")
        assert list_quarantined(world.database) == []


def test_a_relay_that_meets_a_full_memory_keeps_its_connection(
    world: World, node: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """What only reads is answered: it says what is wrong, and goes on by itself."""
    with redis.Redis.from_url(node.url) as client:
        client.config_set("maxmemory", 1)
        try:
            with world.relay():
                world.publish(20)
                wait_until(lambda: says(caplog, "relay_node_out_of_memory"), what="the relay says so")
                assert not says(caplog, "relay_node_away")
                client.config_set("maxmemory", 0)
                world.wait_until_whole()
                assert not says(caplog, "relay_node_away")
        finally:
            client.config_set("maxmemory", 0)


def test_what_fails_while_a_node_is_armed_does_not_end_the_relay(
    world: World, node: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Not only what is known to fail: a fault about one node must not stop the others' LPs."""
    failpoints.arm("rearm.before_fence", "raise")
    with world.relay():
        node.kill()
        node.start()
        world.publish(50)
        world.wait_until_whole()
    told = {record.__dict__.get("error") for record in caplog.records if event_of(record) == "relay_connect_failed"}
    assert told == {"FailpointHit"}


def test_scripts_that_were_flushed_are_loaded_again(world: World, node: RedisServer) -> None:
    with world.relay(), redis.Redis.from_url(node.url) as client:
        world.publish(20)
        world.wait_until_whole()
        client.script_flush()
        world.publish(20, tag="after")
        world.wait_until_whole()


def test_a_node_that_is_down_at_the_start_is_waited_for(
    world: World, node: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    node.stop()
    world.publish(20)
    with caplog.at_level(logging.WARNING), world.relay():
        wait_until(lambda: "relay_node_away" in caplog.text, what="the outage to be told")
        node.start()
        world.wait_until_whole()


def test_a_node_that_stands_still_has_only_its_own_lps_wait(
    database_dsn: str, key_prefix: str, node: RedisServer, start_redis: StartRedis
) -> None:
    other = start_redis()
    world = World(database_dsn, key_prefix, [node.url, other.url])
    world.add_topic("orders", partitions=2)
    with world.relay():
        world.publish(40, keys=40)
        world.wait_until_whole()
        other.send(signal.SIGSTOP)
        world.publish(400, keys=40, tag="while")
        wait_until(lambda: _served_by_first(world, node) == _owed_to_first(world), what="the first node's LPs to go on")
        other.send(signal.SIGCONT)
        world.wait_until_whole()


def test_a_reply_that_is_lost_is_asked_for_again_and_stored_once(
    database_dsn: str, key_prefix: str, node: RedisServer
) -> None:
    with TcpProxy("127.0.0.1", node.port) as proxy:
        world = World(database_dsn, key_prefix, [f"redis://127.0.0.1:{proxy.port}/0"])
        world.add_topic("orders", partitions=2)
        with world.relay():
            world.publish(20)
            world.wait_until_whole()
            for lost in range(4):
                proxy.cut_after(server_bytes=3 * lost)
                world.publish(50, tag=f"cut-{lost}")
                proxy.wait_for_cut(lost + 1)
                proxy.heal()
                world.wait_until_whole()


def test_a_request_that_is_cut_in_the_middle_is_sent_again(
    database_dsn: str, key_prefix: str, node: RedisServer
) -> None:
    with TcpProxy("127.0.0.1", node.port) as proxy:
        world = World(database_dsn, key_prefix, [f"redis://127.0.0.1:{proxy.port}/0"])
        world.add_topic("orders", partitions=2)
        with world.relay():
            for number, size in enumerate((0, 100, 1_000)):
                proxy.cut_after(client_bytes=size)
                world.publish(50, tag=f"cut-{number}")
                proxy.wait_for_cut(number + 1)
                proxy.heal()
                world.wait_until_whole()


def test_postgres_away_at_the_start_is_waited_for_and_its_password_is_not_told(
    world: World, connection: TcpProxy, caplog: pytest.LogCaptureFixture
) -> None:
    world.app_dsn = world.control_dsn = through(world.dsn, connection)
    connection.refuse_new()
    world.publish(20)
    with caplog.at_level(logging.WARNING), world.relay():
        wait_until(lambda: "relay_postgres_unreachable" in caplog.text, what="the outage to be told")
        connection.heal()
        world.wait_until_whole()
    told = [
        str(vars(record).get("reason")) for record in caplog.records if event_of(record) == "relay_postgres_unreachable"
    ]
    assert str(connection.port) in told[0]
    assert "secret-of-the-test" not in "".join(told) + caplog.text


def test_the_compensating_pass_ends_in_its_time_while_postgres_is_away(world: World, connection: TcpProxy) -> None:
    world.app_dsn = world.control_dsn = through(world.dsn, connection)
    connection.refuse_new()
    world.publish(5)
    began = awake_s()
    assert relay_once(world.settings(), at_most_s=1.0, limits=QUICK) == 0
    assert awake_s() - began < 8.0
    connection.heal()
    assert relay_once(world.settings(), at_most_s=30.0, limits=QUICK) == 5


def test_postgres_lost_while_running_is_connected_to_again(world: World, connection: TcpProxy) -> None:
    world.app_dsn = world.control_dsn = through(world.dsn, connection)
    with world.relay():
        for turn in range(3):
            world.publish(50, tag=f"before-{turn}")
            connection.refuse_new()
            connection.reset_all()
            world.publish(50, tag=f"while-{turn}")
            connection.heal()
            world.wait_until_whole()


@pytest.mark.full
def test_answers_of_postgres_that_are_lost_cost_nothing(world: World, connection: TcpProxy) -> None:
    world.app_dsn = world.control_dsn = through(world.dsn, connection)
    with world.relay():
        for turn, size in enumerate((0, 50, 500)):
            connection.cut_after(server_bytes=size)
            world.publish(50, tag=f"cut-{turn}")
            connection.wait_for_cut(turn + 1)
            connection.heal()
            world.wait_until_whole()


@pytest.mark.full
def test_a_postgres_that_crashes_is_waited_for(start_postgres: StartPostgres, redis_url: str, key_prefix: str) -> None:
    server = start_postgres(options={"fsync": "on"})
    dsn = server.create_database("app")
    migrate(dsn)
    world = World(dsn, key_prefix, [redis_url])
    world.add_topic("orders", partitions=2)
    with world.relay():
        world.publish(50)
        server.kill()
        server.start()
        world.publish(50, tag="after")
        world.wait_until_whole()


@pytest.mark.full
def test_a_wrong_key_prefix_is_refused_and_makes_no_second_home(world: World, node: RedisServer) -> None:
    world.publish(20)
    home, world.key_prefix = world.key_prefix, "elsewhere"
    with world.relay():
        wait_until(lambda: _has_tried(node), what="the relay to look at the node")
    world.key_prefix = home
    with world.relay():
        world.wait_until_whole()
    with redis.Redis.from_url(node.url) as client:
        assert list(client.scan_iter("elsewhere:*")) == []


def test_a_node_may_be_registered_again_by_anybody_while_a_relay_runs(world: World, node: RedisServer) -> None:
    with world.relay():
        register_node(runtime_of(world.database), name="node-1", url=node.url)
        world.publish(20)
        world.wait_until_whole()


def _served_by_first(world: World, node: RedisServer) -> int:
    with redis.Redis(port=urlsplit(node.url).port or 0) as client:
        return sum(client.xlen(key) for key in client.scan_iter(f"{world.key_prefix}:*:log"))


def _owed_to_first(world: World) -> int:
    return sum(len(chain) for (_, lp), chain in world.published().items() if lp < 512)


def _has_tried(node: RedisServer) -> bool:
    with redis.Redis.from_url(node.url) as client:
        statistics = client.info("commandstats")
    return "cmdstat_scan" in statistics
