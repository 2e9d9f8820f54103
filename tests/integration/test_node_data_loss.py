"""A node that lost partitions as a whole gets them again, under new epochs, and only where they are really gone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from mqlayer.errors import ConfigurationRefused, Conflict, NodeNotArmed, StoreUnavailable
from mqlayer.postgres.database import Database
from mqlayer.redis.keys import group_keys, partition_keys
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import MessageRun, append_command
from mqlayer.routes import rearm_lost_nodes
from mqlayer.stack import RedisServer
from mqlayer.topics import create_topic, list_nodes, nodes, rearm_node, register_node
from mqlayer.topics.node_repair import NodeRepair
from tests.fixtures.failpoints import broken_off_at
from tests.fixtures.servers import StartRedis
from tests.proof.runtimes import runtime_of


@pytest.fixture
def server(start_redis: StartRedis) -> RedisServer:
    """A Redis of the test's own."""
    return start_redis()


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
def database(database_dsn: str, server: RedisServer, key_prefix: str) -> Iterator[Database]:
    """One node with a topic of two partitions, consumed by a group."""
    with Database(database_dsn) as database:
        register_node(runtime_of(database), name="n1", url=server.url)
        create_topic(runtime_of(database, key_prefix), "orders", partitions=2)
        with database.connection() as connection:
            connection.execute(
                "INSERT INTO mqlayer.consumer_group (topic_id, name, start, backoff_s) "
                "VALUES (1, 'g', 'earliest', '{1}')"
            )
            connection.execute(
                "INSERT INTO mqlayer.assignment (group_id, partition_id, epoch) VALUES (1, 1, nextval('mqlayer.epoch'))"
            )
        yield database


def meta(client: redis.Redis, prefix: str, partition: int) -> dict[bytes, bytes]:
    found: Any = client.hgetall(partition_keys(prefix, partition).meta)
    return dict(found)


def test_lost_partitions_are_made_again_under_epochs_that_no_old_ack_has(
    database: Database, client: redis.Redis, key_prefix: str
) -> None:
    before = meta(client, key_prefix, 1)
    client.flushall()
    _, epochs = rearm_node(runtime_of(database, key_prefix), "n1")
    assert epochs == 1
    assert meta(client, key_prefix, 1) == before
    assert meta(client, key_prefix, 2)[b"lp_from"] == b"512"
    # The new epoch is 2; the lock is held by nobody one below, for the owner to whom Postgres gives it.
    assert client.hmget(group_keys(key_prefix, 1, 1).lock, "owner", "epoch") == [b"", b"1"]
    assert rearm_node(runtime_of(database, key_prefix), "n1")[1] == 0


def test_a_partition_that_is_there_is_left_as_it_is(database: Database, client: redis.Redis, key_prefix: str) -> None:
    keys = partition_keys(key_prefix, 1)
    client.hset(keys.meta, "next", "77")
    client.xadd(keys.log, {"m": "1:0:1:0", "k": "k", "b": "b"}, id="76-0")
    client.hset(keys.marks, "1:0", "1")
    client.delete(partition_keys(key_prefix, 2).meta)
    rearm_node(runtime_of(database, key_prefix), "n1")
    assert meta(client, key_prefix, 1)[b"next"] == b"77"
    assert meta(client, key_prefix, 2)[b"next"] == b"1"


@pytest.mark.parametrize("restarted", [True, False], ids=["restarted", "emptied"])
@pytest.mark.parametrize("place", ["rearm.before_fence", "rearm.before_remake", "rearm.before_arm"])
def test_what_broke_half_way_is_finished_by_the_next(
    database: Database, client: redis.Redis, server: RedisServer, key_prefix: str, place: str, restarted: bool
) -> None:
    """Also where its run is the one that was armed: nobody is served until all that goes by offsets is lower."""
    append = append_as_before(database, key_prefix)
    with database.connection() as connection:
        connection.execute("INSERT INTO mqlayer.group_start (group_id, partition_id, start_offset) VALUES (1, 1, 300)")
    client.flushall()
    if restarted:
        server.restart()
    with broken_off_at(place):
        rearm_node(runtime_of(database, key_prefix), "n1")
    with pytest.raises(NodeNotArmed), NodeConnection(list_nodes(database)[0]) as node_connection:
        node_connection.connect()
    append()
    node, epochs = rearm_node(runtime_of(database, key_prefix), "n1")
    assert epochs == 1
    with database.connection() as connection:
        assert connection.execute("SELECT start_offset FROM mqlayer.group_start").fetchall() == [(1,)]
    assert {meta(client, key_prefix, partition)[b"state"] for partition in (1, 2)} == {b"open"}
    assert rearm_node(runtime_of(database, key_prefix), "n1") == (node, 0)


def test_a_node_that_is_emptied_while_it_is_armed_stays_unarmed(
    database: Database, client: redis.Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the epochs and the partitions: these would be there, and the locks of before could be taken."""
    client.flushall()
    plain, times = NodeRepair.repair, [3]

    def mend(mender: NodeRepair, raised: Any) -> None:
        plain(mender, raised)
        if times[0]:
            times[0] -= 1
            client.flushall()

    monkeypatch.setattr(NodeRepair, "repair", mend)
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="again while it was armed"):
            rearm_node(runtime_of(database, key_prefix), "n1")
        assert list_nodes(database)[0].armed_run_id is None
    rearm_node(runtime_of(database, key_prefix), "n1")
    assert {meta(client, key_prefix, partition)[b"state"] for partition in (1, 2)} == {b"open"}
    assert client.hget(group_keys(key_prefix, 1, 1).lock, "owner") == b""


def test_epochs_are_in_force_in_a_partition_from_the_moment_that_it_is_there(
    database: Database, client: redis.Redis, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the node is emptied between the two: else a woken owner takes the lock under its epoch of before."""
    client.flushall()
    plain, epochs = NodeRepair.repair, []

    def mend(mender: NodeRepair, raised: Any) -> None:
        client.flushall()
        plain(mender, raised)
        epochs.append(client.hget(group_keys(key_prefix, 1, 1).lock, "epoch"))

    monkeypatch.setattr(NodeRepair, "repair", mend)
    rearm_node(runtime_of(database, key_prefix), "n1")
    assert epochs == [b"1"]


def test_a_node_that_lost_more_while_it_is_armed_has_what_goes_by_offsets_lowered_again(
    database: Database, client: redis.Redis, server: RedisServer, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a commit of its own: who dies behind it leaves partitions that are longer than what went before."""
    with database.connection() as connection:
        connection.execute("INSERT INTO mqlayer.group_start (group_id, partition_id, start_offset) VALUES (1, 2, 70)")
    client.hset(partition_keys(key_prefix, 2).meta, "next", "77")
    server.restart()
    client.delete(partition_keys(key_prefix, 1).meta)
    plain, tries = nodes._NodeArming.run, []

    def run(arming: Any, *args: Any, **options: Any) -> Any:
        tries.append(1)
        if len(tries) == 2:
            client.delete(partition_keys(key_prefix, 2).meta)
        return plain(arming, *args, **options)

    monkeypatch.setattr(nodes._NodeArming, "run", run)
    with broken_off_at("rearm.before_arm"):
        rearm_node(runtime_of(database, key_prefix), "n1")
    with database.connection() as connection:
        assert connection.execute("SELECT start_offset FROM mqlayer.group_start").fetchall() == [(1,)]


def test_a_partition_that_waits_for_another_change_is_an_error_and_not_armed_again_and_again(
    database: Database, client: redis.Redis, key_prefix: str
) -> None:
    client.hset(partition_keys(key_prefix, 2).meta, mapping={"state": "importing", "change": "77"})
    with pytest.raises(Conflict, match="waits for the marks of another route change"):
        rearm_node(runtime_of(database, key_prefix), "n1")


def test_a_partition_in_force_that_waits_for_its_marks_is_opened_by_a_worker(
    database: Database, client: redis.Redis, key_prefix: str
) -> None:
    """It was opened on a run that another one took the place of."""
    client.hset(partition_keys(key_prefix, 2).meta, "state", "importing")
    assert rearm_lost_nodes(runtime_of(database, key_prefix)) == {"n1": "armed"}
    assert meta(client, key_prefix, 2)[b"state"] == b"open"
    assert rearm_lost_nodes(runtime_of(database, key_prefix)) == {}


def append_as_before(database: Database, prefix: str) -> Callable[[], None]:
    """Return what appends, where it still can, by a line from before: nobody told it that its node is disarmed."""
    connection = NodeConnection(list_nodes(database)[0])
    connection.connect()

    def append() -> None:
        with contextlib.suppress(StoreUnavailable):
            connection.call([append_command(connection, prefix, 1, 7, [MessageRun(0, 1, 1, [b"0", b"k", b"x"])])])

    return append


def test_partitions_under_another_prefix_are_not_taken_for_lost(
    database: Database, client: redis.Redis, key_prefix: str
) -> None:
    with pytest.raises(ConfigurationRefused, match="MQLAYER_KEY_PREFIX") as refused:
        rearm_node(runtime_of(database, "elsewhere"), "n1")
    assert key_prefix in str(refused.value)
    assert list(client.scan_iter("elsewhere:*")) == []
    # One that is gone, or retired, says nothing of whose the others are.
    client.delete(partition_keys(key_prefix, 2).meta)
    with pytest.raises(ConfigurationRefused, match="say --empty"):
        rearm_node(runtime_of(database, "elsewhere"), "n1")
    rearm_node(runtime_of(database, "elsewhere"), "n1", empty=True)
    assert {meta(client, "elsewhere", partition)[b"state"] for partition in (1, 2)} == {b"open"}


@pytest.mark.parametrize("differs", ["topic", "lp_to"])
def test_another_systems_partitions_do_not_keep_an_emptied_node_unarmed(
    database: Database, client: redis.Redis, key_prefix: str, differs: str
) -> None:
    """Two prefixes on one Redis: their partitions' numbers are the same."""
    others = {number: meta(client, key_prefix, number) for number in (1, 2)}
    client.flushall()
    others[2][differs.encode()] = b"another"
    for number, facts in others.items():
        client.hset(partition_keys("another", number).meta, mapping=facts)  # type: ignore[arg-type]
    rearm_node(runtime_of(database, key_prefix), "n1")
    assert {meta(client, key_prefix, partition)[b"state"] for partition in (1, 2)} == {b"open"}
