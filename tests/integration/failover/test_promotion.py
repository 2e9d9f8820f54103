"""A replica takes the place of its primary, which lives on: at another address, or behind the same one (case 83)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from mqlayer import failpoints
from mqlayer.errors import AcknowledgedLoss, Conflict, NodeNotArmed, StaleToken
from mqlayer.postgres.database import Database
from mqlayer.producing import Message, Producer
from mqlayer.receiving import Receiver
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.routes import rearm_lost_nodes
from mqlayer.stack import RedisServer
from mqlayer.topics import create_topic, find_node, rearm_node, register_node, set_node_address
from tests.fixtures.consumers import Recorder, StartStage, member_of
from tests.fixtures.replicas import Pair, Switch, client_of, pair_of
from tests.fixtures.servers import StartRedis
from tests.fixtures.shared_members import share, shared_member
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of
from tests.proof.world import World


@pytest.fixture
def pair(start_redis: StartRedis) -> Iterator[Pair]:
    """A primary with a replica in step."""
    with pair_of(start_redis) as pair:
        yield pair


@pytest.fixture
def switch(pair: Pair) -> Iterator[Switch]:
    """The address of the primary, until it leads elsewhere."""
    with Switch("127.0.0.1", pair.primary.port) as switch:
        yield switch


def move(dsn: str, server: RedisServer, prefix: str, **options: bool) -> None:
    """Let node 1 be at a server's address."""
    with Database(dsn) as database:
        set_node_address(
            runtime_of(database, prefix, application=database, actor="test"), "node-1", server.url, **options
        )


def loss_of(producer: Producer) -> AcknowledgedLoss:
    """Publish until the producer says what was lost: for a moment the old primary may go on taking messages."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            producer.send("orders", key="k", body=b"taken by the old one", timeout_s=20)
        except AcknowledgedLoss as error:
            return error
    raise TimeoutError("no loss was told")


def test_what_a_promoted_replica_lacks_is_sent_again_without_traffic(
    pair: Pair, database_dsn: str, key_prefix: str
) -> None:
    """Case 83. The old primary lives on, and the relay has a line to it: it is told, and rewinds by the chain."""
    world = World(database_dsn, key_prefix, [pair.primary.url])
    world.add_topic("orders", partitions=2)
    with world.relay() as relay:
        world.publish(40)
        world.wait_until_whole()
        pair.wait_in_step()
        pair.cut_connection()
        world.publish(40, tag="not-replicated")
        world.wait_until_whole()
        pair.promote()
        move(database_dsn, pair.replica, key_prefix)
        world.urls = [pair.replica.url]
        world.wait_until_whole(timeout_s=30)
        assert len(list(world.records())) == 80
        wait_until(lambda: relay.health().ready, what="the relay to be ready again")
        world.publish(40, tag="after")
        world.wait_until_whole()
    with client_of(pair.primary) as old:
        lengths = [old.xlen(partition_keys(key_prefix, partition).log.decode()) for partition in (1, 2)]
    assert sum(lengths) == 80
    audit = world.rows("SELECT facts ->> 'from', facts ->> 'to' FROM mqlayer.audit WHERE act = 'node set'")
    assert audit == [(pair.primary.url, pair.replica.url)]


@pytest.mark.full
def test_a_producer_with_a_connection_to_the_old_primary_is_told_what_is_missing(
    pair: Pair, database_dsn: str, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 83. Without an outbox, what was acknowledged and not replicated is lost: said with LP and seqs, counted."""
    monkeypatch.setattr("mqlayer.producing.metadata_refresher.NODE_POLL_S", 0.05)
    world = World(database_dsn, key_prefix, [pair.primary.url])
    world.add_topic()
    with world.producer() as producer:
        kept = producer.send_many("orders", [Message("k", b"%d" % number) for number in range(3)])[0]
        pair.wait_in_step()
        pair.cut_connection()
        for number in range(3, 5):
            producer.send("orders", key="k", body=b"%d" % number)
        pair.promote()
        move(database_dsn, pair.replica, key_prefix)
        lost = loss_of(producer)
        assert (lost.first_lost, lost.lp) == (4, kept.identity.lp)
        assert producer.stats.lost == lost.last_lost - 3
        again = producer.send("orders", key="k", body=b"again", timeout_s=20)
        assert again.identity.source != kept.identity.source
    world.urls = [pair.replica.url]
    assert world.by_key()["k"] == ["0", "1", "2", "again"]


def test_members_and_receivers_leave_the_old_primary_behind_the_same_address(
    pair: Pair, switch: Switch, start_stage: StartStage, request: pytest.FixtureRequest
) -> None:
    """Their lines stay open, the server behind them answers. What a worker arms at the address is followed."""
    stage = start_stage(f"redis://{switch.host}:{switch.port}/0")
    recorder = Recorder()
    stage.send_numbers(keys=5, each=4)
    app = stage.consume(recorder)
    receiver = Receiver("orders", group="pop", settings=stage.settings()).open()
    request.addfinalizer(receiver.close)
    receiver.receive(1, wait_s=0)
    stage.wait_settled()
    pair.wait_in_step()
    before = member_of(app).owned()
    pair.cut_connection()
    pair.promote()
    switch.lead_to(pair.replica)
    assert rearm_lost_nodes(stage.runtime) == {"node-1": "armed"}
    with client_of(pair.replica) as new:
        locks = [stage.group_keys(partition).lock.decode() for partition in stage.partitions]
        wait_until(lambda: all(new.hget(lock, "owner") for lock in locks), timeout_s=20, what="its locks there")
    stage.send_numbers(keys=5, each=4, first=5)
    wait_until(lambda: recorder.count() == 40, what="what came to the new one handled")
    recorder.assert_in_order()
    received: set[bytes] = set()
    while received < {b"5", b"6", b"7", b"8"}:
        batch = receiver.receive(wait_s=20)
        assert batch, "what came to the new one is not given out"
        received |= {message.body for message in batch}
        # The first ones may still be the old one's.
        with contextlib.suppress(StaleToken, NodeNotArmed):
            receiver.ack(batch)
    assert all(epoch > before[partition][0] for partition, (epoch, _) in member_of(app).owned().items())


def test_members_of_a_shared_group_leave_the_old_primary_behind_the_same_address(
    pair: Pair, switch: Switch, start_stage: StartStage
) -> None:
    """Case 83. Their lines to it stay open too."""
    stage = start_stage(f"redis://{switch.host}:{switch.port}/0")
    recorder = Recorder()
    stage.send_numbers(keys=5, each=4)
    app = share(stage, recorder)
    stage.wait_settled()
    pair.wait_in_step()
    before = shared_member(app).owned()
    pair.cut_connection()
    pair.promote()
    switch.lead_to(pair.replica)
    assert rearm_lost_nodes(stage.runtime) == {"node-1": "armed"}
    stage.send_numbers(keys=5, each=4, first=5)
    wait_until(lambda: len(set(recorder.ended)) == 40, timeout_s=20, what="what came to the new one handled")
    wait_until(
        lambda: all(epoch > before[partition][0] for partition, (epoch, _) in shared_member(app).owned().items()),
        what="higher epochs",
    )


def test_successors_are_opened_on_the_run_that_is_armed(
    pair: Pair, switch: Switch, start_stage: StartStage, redis_url: str, tmp_path: Path
) -> None:
    """Their node changes under a driver that made them there before, and still has a line to its old primary."""
    stage = start_stage(redis_url)
    register_node(runtime_of(stage.database), name="n2", url=f"redis://{switch.host}:{switch.port}/0")
    reached, go_on = tmp_path / "reached", tmp_path / "go-on"
    failpoints.arm("change.after_seal", f"mark:{reached}")
    failpoints.arm("change.after_seal", f"wait:{go_on}")
    with ThreadPoolExecutor(1) as pool:
        parent, to = int(stage.partitions[0]), ["n2", "n2"]
        driving = pool.submit(split, stage.runtime, stage.topic, parent, to=to)
        wait_until(reached.exists, what="the parent to be sealed")
        pair.wait_in_step()
        pair.cut_connection()
        pair.promote()
        switch.lead_to(pair.replica)
        assert rearm_lost_nodes(stage.runtime) == {"n2": "armed"}
        go_on.touch()
        driving.result(20)
    with client_of(pair.replica) as new:
        metas = [partition_keys(stage.prefix, number).meta.decode() for number in (3, 4)]
        assert [new.hget(meta, "state") for meta in metas] == [b"open", b"open"]


def test_an_old_primary_is_never_armed_again_by_whoever_still_reaches_it(
    pair: Pair, switch: Switch, database_dsn: str, key_prefix: str
) -> None:
    """Two that each reach one of the two would arm them in turn. A former primary comes back by a promotion only."""
    with Database(database_dsn) as database:
        register_node(runtime_of(database), name="node-1", url=f"redis://{switch.host}:{switch.port}/0")
        create_topic(runtime_of(database, key_prefix), "orders")
        pair.wait_in_step()
        pair.promote()
        switch.lead_to(pair.replica)
        rearm_node(runtime_of(database, key_prefix), "node-1")
        armed = find_node(database, "node-1").armed_run_id
        switch.lead_to(pair.primary)
        with pytest.raises(NodeNotArmed, match="old primary"):
            rearm_node(runtime_of(database, key_prefix), "node-1")
        assert find_node(database, "node-1").armed_run_id == armed
        # A real fail-back: it follows the one that took its place, and is promoted.
        with client_of(pair.primary) as old:
            old.replicaof("127.0.0.1", str(pair.replica.port))
            # Its new primary waits five seconds for others that want all of its data.
            wait_until(lambda: old.info("replication")["master_link_status"] == "up", timeout_s=30, what="it to follow")
            old.replicaof("NO", "ONE")
        rearm_node(runtime_of(database, key_prefix), "node-1")
        assert find_node(database, "node-1").armed_run_id != armed
        # By an operator's word, whatever it is.
        switch.lead_to(pair.replica)
        with pytest.raises(NodeNotArmed, match="old primary"):
            rearm_node(runtime_of(database, key_prefix), "node-1")
        rearm_node(runtime_of(database, key_prefix), "node-1", former=True)


def test_a_promoted_replica_is_no_node_of_its_own(pair: Pair, database_dsn: str, key_prefix: str) -> None:
    """It carries its primary's partitions: under another name they would be there twice."""
    world = World(database_dsn, key_prefix, [pair.primary.url])
    world.add_topic("orders", partitions=1)
    pair.wait_in_step()
    pair.promote()
    with pytest.raises(Conflict, match="holds partition 1 of node 'node-1'"):
        register_node(world.runtime(), name="node-2", url=pair.replica.url)
    move(database_dsn, pair.replica, key_prefix)
    assert find_node(world.database, "node-1").url == pair.replica.url


@pytest.mark.full
def test_an_address_of_another_redis_is_refused_unless_the_node_is_to_begin_anew(
    pair: Pair, start_redis: StartRedis, database_dsn: str, key_prefix: str
) -> None:
    """An empty node is never taken silently: the outbox's relay fills it again where an operator wants that."""
    world = World(database_dsn, key_prefix, [pair.primary.url])
    world.add_topic("orders", partitions=2)
    other = start_redis()
    with world.relay():
        world.publish(40)
        world.wait_until_whole()
        with pytest.raises(Conflict, match="holds none of the partitions"):
            move(database_dsn, other, key_prefix)
        world.publish(40, tag="more")
        world.wait_until_whole()
        move(database_dsn, other, key_prefix, empty=True)
        world.urls = [other.url]
        world.wait_until_whole(timeout_s=30)


def test_a_connection_whose_server_is_no_primary_any_more_is_given_up(pair: Pair, database_dsn: str) -> None:
    """READONLY is no failure of the write, but of the line: only a new one may lead to the successor."""
    with Database(database_dsn) as database:
        node = register_node(runtime_of(database), name="node-1", url=pair.primary.url)
    with NodeConnection(node) as connection, client_of(pair.primary) as old:
        assert connection.call([("SET", "a", "1")]) == [b"OK"]
        pair.promote()
        old.replicaof("127.0.0.1", str(pair.replica.port))
        (reply,) = connection.call([("SET", "a", "2")])
        assert isinstance(reply, redis.exceptions.ReadOnlyError)
        with pytest.raises(Exception, match="not the primary any more"):
            connection.call([("PING",)])
        with pytest.raises(Exception, match="slave"):
            connection.call([("PING",)])


def test_a_connection_that_another_thread_closes_is_not_opened_again_without_being_checked(
    pair: Pair, switch: Switch, database_dsn: str
) -> None:
    """The driver connects by itself where it finds its socket closed, perhaps to another server."""
    with Database(database_dsn) as database:
        node = register_node(runtime_of(database), name="node-1", url=f"redis://{switch.host}:{switch.port}/0")
    connection = NodeConnection(node)
    connection.connect()
    facts = connection.facts
    switch.lead_to(pair.replica)
    pair.promote()
    closing = threading.Thread(target=connection.close)
    closing.start()
    closing.join()
    # As if it was closed between our look at the facts and the write.
    connection.facts = facts
    with pytest.raises(NodeNotArmed):
        connection.call([("SET", "a", "1")])
    with client_of(pair.replica) as client:
        assert client.get("a") is None
    connection.close()


def test_a_replaced_postgres_does_not_make_an_old_primary_eligible_again(
    pair: Pair, switch: Switch, database_dsn: str, key_prefix: str
) -> None:
    """Both fail over at once: no run is armed then, and the replica's must not be the only one that was ever known."""
    with Database(database_dsn) as database:
        register_node(runtime_of(database), name="node-1", url=f"redis://{switch.host}:{switch.port}/0")
        create_topic(runtime_of(database, key_prefix), "orders")
        pair.wait_in_step()
        # As `server_seen_v1` does, and a move away from the node.
        with database.connection() as connection:
            connection.execute("UPDATE mqlayer.node SET armed_run_id = NULL")
        pair.promote()
        switch.lead_to(pair.replica)
        rearm_node(runtime_of(database, key_prefix), "node-1")
        switch.lead_to(pair.primary)
        with pytest.raises(NodeNotArmed, match="old primary"):
            rearm_node(runtime_of(database, key_prefix), "node-1")
        with database.connection() as connection:
            connection.execute("UPDATE mqlayer.node SET armed_run_id = NULL")
        with pytest.raises(NodeNotArmed, match="old primary"):
            rearm_node(runtime_of(database, key_prefix), "node-1")
        switch.lead_to(pair.replica)
        rearm_node(runtime_of(database, key_prefix), "node-1")
