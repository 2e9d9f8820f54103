"""A node that is a Redis Cluster: partitions lie on all shards; shards restart, fail over, and pass slots on."""

from __future__ import annotations

import signal
import threading
from contextlib import closing, suppress

import pytest
import redis

from mqlayer.doctor.broker import ask_broker, check_apart
from mqlayer.doctor.diagnosis import diagnose_node
from mqlayer.doctor.findings import LIMITS, CheckStatus
from mqlayer.doctor.nodes import RegisteredNode
from mqlayer.errors import (
    AcknowledgedLoss,
    ConfigurationRefused,
    Conflict,
    MqlayerError,
    PublishUnknown,
    StoreUnavailable,
)
from mqlayer.inspect.node_status import node_statuses
from mqlayer.producing import Message, Producer
from mqlayer.redis.cluster_connection import ClusterConnection
from mqlayer.redis.node_connection import raise_for_reply
from mqlayer.relay import relay_once
from mqlayer.routes import rearm_lost_nodes
from mqlayer.topics import find_node, register_node, set_durability, set_node_address, set_node_replicas
from tests.fixtures.cluster_load import move_each_slot, publishing
from tests.fixtures.clusters import SLOTS, Cluster, StartCluster, slot_of
from tests.fixtures.consumers import Recorder, StartStage
from tests.fixtures.receivers import OpenReceiver
from tests.fixtures.servers import StartRedis
from tests.fixtures.shared_members import share
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World

# One process of a run starts the shared cluster.
pytestmark = pytest.mark.xdist_group("cluster")


def test_a_relay_fills_partitions_on_all_shards(shared_cluster: Cluster, database_dsn: str, key_prefix: str) -> None:
    world = World(database_dsn, key_prefix, [shared_cluster.url])
    world.add_topic("orders", partitions=6)
    partitions = [partition for _, partition, _ in world.partitions()]
    assert len({shared_cluster.owner(partition).port for partition in partitions}) == 3
    with world.relay():
        world.publish(60)
        world.wait_until_whole()


def test_groups_of_all_kinds_consume_from_all_shards(
    shared_cluster: Cluster, start_stage: StartStage, receiver_of: OpenReceiver
) -> None:
    stage = start_stage(shared_cluster.url, partitions=4)
    ordered, shared, every = Recorder(), Recorder(), Recorder()
    stage.consume(ordered)
    app = stage.app()
    app.consumer("orders", group="b", mode="broadcast", instance="web-1", start="earliest")(every)
    app.start()
    share(stage, shared, group="s")
    receiver = receiver_of(stage, group="p")
    popped: list[bytes] = []
    with closing(Producer(stage.settings(), name="p")) as producer:
        producer.send_many("orders", [Message(f"k{n % 8}", b"%d" % n) for n in range(1, 81)])
    while len(popped) < 80:
        batch = receiver.receive(20, wait_s=20)
        assert batch
        popped += [message.body for message in batch]
        receiver.ack(batch)
    wait_until(lambda: ordered.count() == shared.count() == every.count() == 80, timeout_s=20, what="all handled")
    ordered.assert_in_order()
    assert sorted(popped, key=int) == [b"%d" % n for n in range(1, 81)]
    stage.wait_settled()


def test_a_failing_key_of_a_cluster_parks(shared_cluster: Cluster, start_stage: StartStage) -> None:
    stage = start_stage(shared_cluster.url, partitions=3)
    failing = threading.Event()
    failing.set()

    def act(body: bytes, ctx: object) -> None:
        if failing.is_set() and body == b"1":
            raise ValueError(body)

    recorder = Recorder(act)
    stage.consume(recorder, attempt_limit=2, policy="park")
    stage.send_numbers(3, 4)
    wait_until(stage.all_settled, timeout_s=20, what="all settled or parked")
    assert b"1" not in recorder.bodies()
    with stage.database.connection() as connection:
        parked = connection.execute("SELECT count(DISTINCT name) FROM mqlayer.parked_message").fetchall()
    assert parked == [(3,)]


def test_a_cluster_is_told_as_one_node(shared_cluster: Cluster, start_stage: StartStage) -> None:
    stage = start_stage(shared_cluster.url)
    (found,) = node_statuses(stage.runtime)
    assert found.state == "serving"
    assert found.server is not None
    assert len(found.server.shards) == 3
    findings = diagnose_node(RegisteredNode(found.node, None, {}), stage.prefix, LIMITS).findings
    assert sum(finding.check == "persistence" for finding in findings) == 3
    assert [finding.check for finding in findings if finding.verdict is CheckStatus.BROKEN] == []
    (role,) = [finding for finding in findings if finding.check == "role"]
    assert "a cluster of 3 shards; without a replica" in role.seen
    with pytest.raises(Conflict, match="holds partition"):
        register_node(stage.runtime, name="again", url=shared_cluster.url)
    with pytest.raises(Conflict, match="is a cluster"):
        set_node_address(stage.runtime, "node-1", "redis://127.0.0.1:1/0")


def test_a_server_of_a_cluster_is_no_node_by_itself(
    shared_cluster: Cluster, database_dsn: str, key_prefix: str
) -> None:
    """Else the first topic would find out, by slots that it does not serve."""
    with pytest.raises(ConfigurationRefused, match="register that as one node: cluster://host"):
        World(database_dsn, key_prefix, [shared_cluster.servers[0].url])


def test_a_redirect_is_told_in_words(shared_cluster: Cluster) -> None:
    first = shared_cluster.servers[0]
    partition = next(number for number in range(100) if slot_of(number) not in shared_cluster.slots(first))
    with pytest.raises(redis.exceptions.MovedError) as moved:
        shared_cluster.ask(first, "XLEN", f"x:{{{partition}}}:log")
    where = f"slot {slot_of(partition)} of the cluster moved, or is moving, to 127.0.0.1:"
    with pytest.raises(StoreUnavailable, match=where):
        raise_for_reply(moved.value, "n")


def test_the_doctor_finds_a_broker_on_a_shard(
    shared_cluster: Cluster, database_dsn: str, key_prefix: str, start_redis: StartRedis
) -> None:
    world = World(database_dsn, key_prefix, [shared_cluster.url])
    node = RegisteredNode(find_node(world.database, "node-1"), None, {})
    checked = diagnose_node(node, key_prefix, LIMITS).node
    assert checked is not None
    for shard in shared_cluster.primaries():
        broker, _ = ask_broker(shard.url, timeout_s=5.0)
        assert broker is not None
        finding = check_apart(shard.url, broker, [checked])
        assert finding.verdict is CheckStatus.WARNING
        assert finding.seen.endswith(f"node node-1 shard redis://127.0.0.1:{shard.port}/0"), finding
    other = start_redis()
    broker, _ = ask_broker(other.url, timeout_s=5.0)
    assert broker is not None
    assert check_apart(other.url, broker, [checked]).verdict is CheckStatus.OK


@pytest.mark.full
def test_a_topic_s_class_waits_for_the_replica_of_each_shard(
    start_cluster: StartCluster, database_dsn: str, key_prefix: str
) -> None:
    """Where one shard lacks its replica, only what lies on it is not confirmed."""
    cluster = start_cluster(timeout_ms=60_000)
    world = World(database_dsn, key_prefix, [cluster.url])
    world.add_topic("orders", partitions=6)
    set_node_replicas(world.runtime(), "node-1", 1)
    set_durability(world.runtime(), "orders", "replica")
    primaries = cluster.primaries()
    lone = cluster.replica_of(primaries[0])
    with world.relay():
        world.publish(60)
        world.wait_until_whole()
        wait_until(lambda: recorded(world) == 60, timeout_s=20, what="all is confirmed")
        keys = [f"k{number}" for number in range(20)]
        with world.producer(close_within_s=0.1, options={"replicas": 1, "replica_timeout_s": 0.3}) as producer:
            where = {key: producer.send("orders", key=key, body=b"x").partition for key in keys}
            lone.send(signal.SIGSTOP)
            slots = cluster.slots(primaries[0])
            waiting = [key for key in keys if slot_of(where[key]) in slots]
            assert 0 < len(waiting) < len(keys)
            for key in keys:
                if key in waiting[:2]:
                    with pytest.raises(PublishUnknown, match="0 of 1 replicas have it"):
                        producer.send("orders", key=key, body=b"x", timeout_s=3)
                elif key not in waiting:
                    assert producer.send("orders", key=key, body=b"x", timeout_s=20).replicas == 1
        world.publish(60)
        wait_until(lambda: recorded(world) > 60, timeout_s=20, what="what lies elsewhere is confirmed")
        assert recorded(world) < 120
        lone.send(signal.SIGCONT)
        wait_until(lambda: recorded(world) == 120, timeout_s=30, what="all is confirmed again")


@pytest.mark.full
def test_waits_for_a_shard_without_its_replica_hold_up_no_other_shard(
    start_cluster: StartCluster, database_dsn: str, key_prefix: str
) -> None:
    """A direct producer repeats what lies there; others' messages are confirmed meanwhile."""
    cluster = start_cluster(timeout_ms=60_000)
    world = World(database_dsn, key_prefix, [cluster.url])
    world.add_topic("orders", partitions=24)
    set_node_replicas(world.runtime(), "node-1", 1)
    set_durability(world.runtime(), "orders", "replica")
    primary = cluster.primaries()[0]
    lone = cluster.replica_of(primary)
    with world.producer(close_within_s=0.1, options={"replicas": 1, "replica_timeout_s": 0.3}) as producer:
        where = {f"k{number}": producer.send("orders", key=f"k{number}", body=b"x") for number in range(60)}
        slots = cluster.slots(primary)
        lacking = [key for key, receipt in where.items() if slot_of(receipt.partition) in slots]
        others = [key for key in where if key not in lacking]
        assert len({where[key].partition for key in lacking}) > 3
        lone.send(signal.SIGSTOP)
        waiting = [producer.send_async("orders", key=key, body=b"y") for key in lacking]
        for key in others:
            assert producer.send("orders", key=key, body=b"y", timeout_s=20).replicas == 1
        assert not any(future.done() for future in waiting)
        lone.send(signal.SIGCONT)
        assert [future.result(timeout=20).replicas for future in waiting] == [1] * len(lacking)


def recorded(world: World) -> int:
    """Return how many messages an outbox may forget."""
    return int(world.rows("SELECT coalesce(sum(seq), 0)::int FROM mqlayer_app.relayed")[0][0])


@pytest.mark.full
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
        world.wait_until_whole(timeout_s=40)


@pytest.mark.full
def test_members_and_producers_follow_a_replica_that_lagged(
    start_cluster: StartCluster, start_stage: StartStage
) -> None:
    """What it lacks is an AcknowledgedLoss, named; other shards' partitions keep their epochs."""
    cluster = start_cluster()
    stage = start_stage(cluster.url, partitions=6)
    armed = find_node(stage.database, "node-1").armed_run_id
    recorder = Recorder()
    stage.consume(recorder)
    lost = stage.partitions[0]
    primary = cluster.owner(lost)
    key, others = stage.key_in(lost), [one for one in stage.partitions if cluster.owner(one) is not primary]
    with closing(Producer(stage.settings(), name="p")) as producer:
        producer.send_many("orders", [Message(key, b"%d" % number) for number in range(1, 11)])
        wait_until(lambda: recorder.count() == 10, timeout_s=20, what="the first ones handled")
        cluster.wait_ok()
        before = {partition: epoch for partition, _, epoch, _ in stage.assignments()}
        cluster.hold_back(primary)
        producer.send_many("orders", [Message(key, b"%d" % number) for number in range(11, 16)])
        wait_until(lambda: recorder.count() == 15, timeout_s=20, what="those that will be lost handled")
        cluster.kill(primary)
        with pytest.raises(AcknowledgedLoss) as caught:
            wait_until(lambda: producer.send("orders", key=key, body=b"16", timeout_s=30), what="the loss told")
        assert (caught.value.first_lost, caught.value.last_lost) == (11, 15)
        producer.send("orders", key=key, body=b"17", timeout_s=30)
        wait_until(lambda: recorder.bodies()[-1] == b"17", timeout_s=30, what="what comes after it handled")
    assert find_node(stage.database, "node-1").armed_run_id not in (None, armed)
    after = {partition: epoch for partition, _, epoch, _ in stage.assignments()}
    assert after[lost] > before[lost]
    assert {one: after[one] for one in others} == {one: before[one] for one in others}
    assert rearm_lost_nodes(runtime_of(stage.database, stage.prefix, application=stage.database)) == {}
    recorder.assert_in_order()


@pytest.mark.full
def test_slots_that_move_under_load_keep_their_order(start_cluster: StartCluster, start_stage: StartStage) -> None:
    """Nothing is lost, no key is handled by two at a time or out of order, and nothing has to be armed."""
    cluster = start_cluster(replicas=0)
    stage = start_stage(cluster.url, partitions=3)
    armed = find_node(stage.database, "node-1").armed_run_id
    recorder, shared = Recorder(), Recorder()
    stage.consume(recorder)
    share(stage, shared, group="s")
    with publishing(stage) as sent:
        for _ in range(2):
            move_each_slot(cluster, stage.partitions, recorder, cluster.move_slot)
    wait_until(lambda: recorder.count() == len(sent), timeout_s=30, what="all handled")
    wait_until(lambda: shared.count() == len(sent), timeout_s=30, what="all handled by the shared group")
    recorder.assert_in_order()
    stage.wait_settled()
    assert find_node(stage.database, "node-1").armed_run_id == armed


@pytest.mark.full
def test_a_half_moved_slot_serves_nothing_and_loses_nothing(
    start_cluster: StartCluster, start_stage: StartStage
) -> None:
    cluster = start_cluster(replicas=0)
    stage = start_stage(cluster.url, partitions=3)
    recorder = Recorder()
    stage.consume(recorder)
    stage.send(((f"key-{number % 4}", b"%d" % number) for number in range(1, 21)), source=99)
    wait_until(lambda: recorder.count() == 20, timeout_s=20, what="the first ones handled")
    partition = stage.partitions[0]
    key = stage.key_in(partition)
    target = next(one for one in cluster.primaries() if one is not cluster.owner(partition))
    refused: list[MqlayerError] = []

    def try_one() -> None:
        producer = Producer(stage.settings(), name="q")
        try:
            producer.send("orders", key=key, body=b"100", timeout_s=0.3)
        except MqlayerError as error:
            refused.append(error)
        finally:
            producer.close(timeout_s=0.3)

    cluster.move_slot(slot_of(partition), target, between=try_one)
    assert refused
    with closing(Producer(stage.settings(), name="p")) as producer:
        producer.send("orders", key=key, body=b"101", timeout_s=10)
    wait_until(lambda: recorder.bodies()[-1] == b"101", timeout_s=20, what="the next one handled")
    recorder.assert_in_order()


@pytest.mark.full
def test_a_cluster_that_is_down_comes_back(start_cluster: StartCluster, start_stage: StartStage) -> None:
    """Without a replica the whole cluster refuses until the shard is back; then that shard alone is armed."""
    cluster = start_cluster(replicas=0)
    stage = start_stage(cluster.url, partitions=6)
    recorder = Recorder()
    stage.consume(recorder)
    stage.send(((f"key-{number % 6}", b"%d" % number) for number in range(1, 25)), source=99)
    wait_until(lambda: recorder.count() == 24, timeout_s=20, what="the first ones handled")
    primary = cluster.owner(stage.partitions[0])
    others = [one for one in stage.partitions if cluster.owner(one) is not primary]
    before = {partition: epoch for partition, _, epoch, _ in stage.assignments()}
    primary.kill()
    with pytest.raises(StoreUnavailable), stage.connection() as line:
        line.call([("PING",)])
    primary.start()
    cluster.wait_ok()
    with publishing(stage, first=25) as sent:
        wait_until(lambda: recorder.count() > 24 + 20, timeout_s=30, what="more handled")
    stage.wait_settled()
    assert recorder.count() == 24 + len(sent)
    after = {partition: epoch for partition, _, epoch, _ in stage.assignments()}
    assert {one: after[one] for one in others} == {one: before[one] for one in others}
    assert all(after[one] > before[one] for one in stage.partitions if one not in others)
    recorder.assert_in_order()


@pytest.mark.full
def test_a_shard_that_gave_its_slots_away_gets_them_back(
    start_cluster: StartCluster, database_dsn: str, key_prefix: str
) -> None:
    """It was never a replica, so it is the process of before: no old primary, since the armed shards say so."""
    cluster = start_cluster(replicas=0)
    first, _, third = cluster.servers
    world = World(database_dsn, key_prefix, [cluster.url])
    world.add_topic("orders", partitions=6)
    partitions, before = [partition for _, partition, _ in world.partitions()], cluster.slots(third)
    moved = [partition for partition in partitions if slot_of(partition) in before]
    with world.relay():
        world.publish(60)
        world.wait_until_whole()
        cluster.move_all(third, first, partitions)
        world.publish(60, tag="away")
        world.wait_until_whole(timeout_s=40)
        wait_until(lambda: armed_shards(world) == 2, what="the node armed without it")
        cluster.pass_on(before - {slot_of(partition) for partition in moved}, first, third)
        for partition in moved:
            cluster.move_slot(slot_of(partition), third)
        world.publish(60, tag="back")
        world.wait_until_whole(timeout_s=40)
        wait_until(lambda: armed_shards(world) == 3, what="the node armed with it")
    cluster.wait_ok()
    with world.runtime().connection(find_node(world.database, "node-1")) as line:
        assert isinstance(line, ClusterConnection)
        line.connect()
        assert line.is_told_by([0, 1, 2])
        assert not line.is_told_by([]), "a shard by itself is no witness"


def test_a_server_that_joined_another_cluster_is_no_seed_any_more(
    start_cluster: StartCluster, database_dsn: str, key_prefix: str
) -> None:
    """Else the node would begin anew there, without what its groups have not handled."""
    mine, other = (start_cluster(shards=1, replicas=0) for _ in range(2))
    url = f"{other.url},{mine.url.removeprefix('cluster://')}"
    with pytest.raises(StoreUnavailable, match="its servers are of different clusters"):
        World(database_dsn, key_prefix, [url])
    (stranger,) = other.servers
    other.ask(stranger, "CLUSTER", "FLUSHSLOTS")
    world = World(database_dsn, key_prefix, [url])
    armed = find_node(world.database, "node-1").armed_run_id
    world.add_topic("orders", partitions=1)
    other.ask(stranger, "CLUSTER", "ADDSLOTS", *range(SLOTS))
    other.wait_ok()
    world.publish(10)
    assert relay_once(world.settings(), limits=QUICK) == 10
    (status,) = node_statuses(world.runtime())
    assert status.state == "serving"
    assert find_node(world.database, "node-1").armed_run_id == armed
    assert mine.ask(mine.servers[0], "XLEN", world.keys(1).log) == 10


@pytest.mark.full
def test_a_shard_that_was_emptied_is_repaired(start_cluster: StartCluster, database_dsn: str, key_prefix: str) -> None:
    cluster = start_cluster(replicas=0)
    world = World(database_dsn, key_prefix, [cluster.url])
    world.add_topic("orders", partitions=6)
    with world.relay():
        world.publish(60)
        world.wait_until_whole()
        cluster.ask(cluster.owner(world.partitions()[0][1]), "FLUSHALL")
        world.publish(60, tag="after")
        world.wait_until_whole(timeout_s=40)


def armed_shards(world: World) -> int:
    """Arm the node, as the periodic job does; return how many shards it has then."""
    with suppress(StoreUnavailable):
        world.arm_node()
    return len((find_node(world.database, "node-1").armed_run_id or "").split())
