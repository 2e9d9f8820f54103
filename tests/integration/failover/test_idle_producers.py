"""A node loses what a producer published, which publishes elsewhere or nothing: it hears of it all the same."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

import mqlayer
from mqlayer import events
from mqlayer.domain.routing import PartitionId, lp_of
from mqlayer.errors import AcknowledgedLoss
from mqlayer.producing import Message, Producer, Receipt
from mqlayer.stack import RedisServer
from mqlayer.topics import set_node_address
from tests.fixtures.backups import Backup
from tests.fixtures.replicas import Pair, pair_of
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.proxy import TcpProxy
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

pytestmark = pytest.mark.world(own_node=True)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NODE_POLL_S", "IDLE_POLL_S", "IDLE_ROUTE_AGE_S", "ROUTE_CHECK_AFTER_S"):
        monkeypatch.setattr(f"mqlayer.producing.metadata_refresher.{name}", 0.05)


@pytest.fixture
def heard() -> Iterator[list[mqlayer.Event]]:
    """What the hooks of this process were told."""
    told: list[mqlayer.Event] = []
    mqlayer.on_event(told.append)
    yield told
    events.remove_hook(told.append)


def armed_run(world: World) -> str:
    """Return the run that Postgres has armed."""
    ((run,),) = world.rows("SELECT armed_run_id FROM mqlayer.node WHERE name = 'node-1'")
    return str(run)


def wait_for_loss(producer: Producer, count: int) -> None:
    """Wait until the producer has counted so many lost messages."""
    wait_until(lambda: producer.stats.lost == count, timeout_s=20, what=f"{count} lost messages, without publishing")


def empty(world: World) -> None:
    """Empty the node, and arm it."""
    with world.client() as client:
        client.flushall()
    world.arm_node()


def look_after_restart(world: World, node: RedisServer, producer: Producer) -> None:
    """Restart the node, arm it, and return when the producer has looked at it."""
    node.kill()
    node.start()
    world.arm_node()
    looks = producer._engine._metadata._loss_detector
    armed_at = world.rows("SELECT armed_at FROM mqlayer.node")[0][0]
    wait_until(lambda: armed_at in looks._armed_at.values() and not looks._due, what="a look")


def publish_under_two_sources(
    world: World, node: RedisServer, producer: Producer, backup: Path
) -> tuple[Receipt, Receipt]:
    """Leave three messages of a key under a source whose fourth was lost, and told; and one under the next source.

    Return the first one of each.
    """
    first = producer.send_many("orders", [Message("k", b"x") for _ in range(3)])[0]
    fall_back_to_here = Backup(node, world.arm_node, backup)
    producer.send("orders", key="k", body=b"lost")
    fall_back_to_here.restore()
    wait_for_loss(producer, 1)
    with pytest.raises(AcknowledgedLoss):
        producer.flush()
    return first, producer.send("orders", key="k", body=b"0")


def test_a_producer_that_publishes_nothing_is_told_what_its_node_lost(
    world: World, node: RedisServer, tmp_path: Path, heard: list[mqlayer.Event]
) -> None:
    """Case 83: two LPs lost their end, a third did not. All of it is one error, told once."""
    with world.producer() as producer:
        kept = producer.send_many("orders", [Message("k", b"%d" % number) for number in range(3)])[0]
        producer.send("orders", key="whole", body=b"0")
        fall_back_to_here = Backup(node, world.arm_node, tmp_path / "backup")
        producer.send_many("orders", [Message("k", b"lost"), Message("k", b"lost"), Message("other", b"lost")])
        before = armed_run(world)
        fall_back_to_here.restore()

        wait_for_loss(producer, 3)
        with pytest.raises(AcknowledgedLoss) as raised:
            producer.flush()
        losses = {loss.lp: loss for loss in raised.value.losses}
        assert {lp: (loss.first, loss.last) for lp, loss in losses.items()} == {
            lp_of(b"k"): (4, 5),
            lp_of(b"other"): (1, 1),
        }
        for loss in losses.values():
            assert (loss.topic, loss.source, loss.node) == ("orders", kept.identity.source, "node-1")
            assert (loss.run_before, loss.run_after) == (before, armed_run(world))
        assert pickle.loads(pickle.dumps(raised.value)).losses == raised.value.losses
        # Hooks hear of it behind the count.
        wait_until(lambda: len(heard) == 2, what="the events")
        told = {event.lp: (event.kind, event.topic, event.seq, event.count, event.group) for event in heard}
        assert told == {
            lp_of(b"k"): ("acknowledged_loss", "orders", 4, 2, ""),
            lp_of(b"other"): ("acknowledged_loss", "orders", 1, 1, ""),
        }
        assert all("node-1" in event.cause and before[:8] in event.cause for event in heard)

        assert producer.flush() == 0
        again = producer.send("orders", key="k", body=b"again")
        assert (again.identity.seq, again.identity.source != kept.identity.source) == (1, True)
        assert producer.send("orders", key="whole", body=b"1").identity.seq == 2
        assert producer.stats.lost == 3
    assert world.by_key() == {"k": ["0", "1", "2", "again"], "whole": ["0", "1"]}


def test_a_producer_that_publishes_to_other_lps_is_told_by_its_next_call(
    world: World, node: RedisServer, tmp_path: Path
) -> None:
    """What raises is not stored; futures and oneway messages that went before are."""
    with world.producer() as producer:
        producer.send("orders", key="elsewhere", body=b"0")
        fall_back_to_here = Backup(node, world.arm_node, tmp_path / "backup")
        producer.send("orders", key="k", body=b"lost")
        fall_back_to_here.restore()
        producer.send_oneway("orders", key="elsewhere", body=b"1")
        wait_for_loss(producer, 1)
        producer.send_oneway("orders", key="elsewhere", body=b"2")
        with pytest.raises(AcknowledgedLoss, match=r"acknowledged messages 1 to 1 of source") as raised:
            producer.send_async("orders", key="elsewhere", body=b"refused")
        assert raised.value.lp == lp_of(b"k")
        assert producer.send("orders", key="elsewhere", body=b"3").identity.seq == 4
    assert world.by_key() == {"elsewhere": ["0", "1", "2", "3"]}


def test_a_node_that_was_emptied_goes_on_as_the_same_run_and_is_looked_at(world: World) -> None:
    """Case 42. FLUSHALL: nothing restarted, nobody publishes; whoever closes the producer hears it then."""
    producer = Producer(world.settings(), name="test")
    producer.send_many("orders", [Message(f"k{number}", b"x") for number in range(50)])
    before = armed_run(world)
    empty(world)
    assert armed_run(world) == before
    wait_for_loss(producer, 50)
    with pytest.raises(AcknowledgedLoss) as raised:
        producer.close()
    assert sum(loss.messages for loss in raised.value.losses) == 50
    assert {loss.run_before for loss in raised.value.losses} == {""}
    producer.close()
    assert not world.rows("SELECT 1 FROM mqlayer.source WHERE closed_at IS NULL")


def test_what_was_acknowledged_before_a_loss_is_missed_too_when_the_node_loses_that_as_well(
    world: World, node: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 83. Nobody continues the former source, so no chain tells; each message is told once, and nothing fails."""
    monkeypatch.setattr("mqlayer.producing.loss_detector.MARKS_PER_CALL", 1)
    with world.producer() as producer:
        first = producer.send_many("orders", [Message("k", b"x") for _ in range(8)])[0].identity
        fall_back_to_here = Backup(node, world.arm_node, tmp_path / "backup")
        producer.send_many("orders", [Message("k", b"x"), Message("k", b"x")])
        fall_back_to_here.restore()
        wait_for_loss(producer, 2)
        with pytest.raises(AcknowledgedLoss):
            producer.flush()
        second = producer.send_many("orders", [Message("k", b"x") for _ in range(5)])[0].identity

        empty(world)
        wait_for_loss(producer, 2 + 8 + 5)
        with pytest.raises(AcknowledgedLoss) as raised:
            producer.flush()
        lost = [(loss.source, loss.lp, loss.first, loss.last, loss.node) for loss in raised.value.losses]
        assert lost == [(first.source, first.lp, 1, 8, "node-1"), (second.source, first.lp, 1, 5, "node-1")]

        third = producer.send("orders", key="k", body=b"kept").identity
        assert (third.lp, third.seq) == (first.lp, 1)
        empty(world)
        wait_for_loss(producer, 2 + 8 + 5 + 1)
        with pytest.raises(AcknowledgedLoss) as raised:
            producer.flush()
        assert [(loss.source, loss.first, loss.last) for loss in raised.value.losses] == [(third.source, 1, 1)]


def test_a_loss_of_former_messages_only_leaves_the_present_source_alone(
    world: World, node: RedisServer, tmp_path: Path, heard: list[mqlayer.Event]
) -> None:
    """What is missing is told; the lane goes on with its next number."""
    with world.producer() as producer:
        first, second = publish_under_two_sources(world, node, producer, tmp_path / "backup")
        with world.client() as client:
            client.hset(world.keys(first.partition).marks, f"{first.identity.source}:{first.identity.lp}", 1)
        node.kill()
        node.start()
        world.arm_node()
        wait_for_loss(producer, 1 + 2)
        with pytest.raises(AcknowledgedLoss) as raised:
            producer.flush()
        assert [loss[:5] for loss in raised.value.losses] == [("orders", lp_of(b"k"), 2, 3, first.identity.source)]
        wait_until(lambda: len(heard) == 2, what="the second event")
        assert [(event.seq, event.count, event.partition) for event in heard[1:]] == [(2, 2, first.partition)]
        assert producer.send("orders", key="k", body=b"1").identity == second.identity._replace(seq=2)


def test_what_was_acknowledged_before_an_unanswered_duplicate_is_missed_too(
    database_dsn: str, key_prefix: str, node: RedisServer
) -> None:
    """The lane goes on under another source, without any loss."""
    parts = redis.ConnectionPool.from_url(node.url).connection_kwargs
    with TcpProxy(parts["host"], parts["port"]) as proxy:
        world = World(database_dsn, key_prefix, [f"redis://{proxy.host}:{proxy.port}/0"], [node.url])
        world.add_topic()
        with world.producer() as producer:
            before = producer.send("orders", key="k", body=b"x", dedup_id="a").identity
            producer.send_many("orders", [Message("k", b"x"), Message("k", b"x")])
            proxy.cut_after(server_bytes=0)
            again = producer.send_async("orders", key="k", body=b"x", dedup_id="a")
            proxy.wait_for_cut()
            assert again.result(20).duplicate
            after = producer.send("orders", key="k", body=b"x").identity
            assert (after.seq, after.source != before.source) == (1, True)
            empty(world)
            wait_for_loss(producer, 3 + 1)
            with pytest.raises(AcknowledgedLoss) as raised:
                producer.flush()
            lost = {loss.source: (loss.first, loss.last) for loss in raised.value.losses}
            assert lost == {before.source: (1, 3), after.source: (1, 1)}


def test_successors_lack_nothing_of_a_former_source_that_their_parent_had(
    world: World, node: RedisServer, tmp_path: Path
) -> None:
    """They come with all marks, also of what was trimmed, whether the lane was sent there before or not."""
    with world.producer() as producer:
        first, second = publish_under_two_sources(world, node, producer, tmp_path / "backup")
        split(runtime_of(world.database, world.key_prefix), "orders", PartitionId(first.partition))
        with world.client() as client:
            client.xtrim(world.keys(first.partition).log, maxlen=0, approximate=False)
        look_after_restart(world, node, producer)
        after = producer.send("orders", key="k", body=b"1")
        assert (after.identity, after.partition != first.partition) == (second.identity._replace(seq=2), True)
        look_after_restart(world, node, producer)
        assert (producer.stats.lost, producer.flush()) == (1, 0)


def test_what_goes_wrong_in_the_block_is_not_hidden_by_what_was_lost(world: World) -> None:
    def lose_and_fail() -> None:
        with Producer(world.settings(), name="test") as producer:
            producer.send("orders", key="k", body=b"x")
            empty(world)
            wait_for_loss(producer, 1)
            raise LookupError

    with pytest.raises(LookupError):
        lose_and_fail()


def test_what_a_promoted_replica_lacks_is_told_to_a_producer_that_publishes_nothing(
    start_redis: StartRedis, database_dsn: str, key_prefix: str
) -> None:
    """Case 83. The old primary lives on, and so does the producer's line to it."""
    with pair_of(start_redis) as pair:
        lose_the_end_of_a_replica(pair, World(database_dsn, key_prefix, [pair.primary.url]))


def lose_the_end_of_a_replica(pair: Pair, world: World) -> None:
    world.add_topic()
    with world.producer() as producer:
        producer.send_many("orders", [Message("k", b"%d" % number) for number in range(3)])
        pair.wait_in_step()
        pair.cut_connection()
        producer.send_many("orders", [Message("k", b"lost"), Message("other", b"lost")])
        pair.promote()
        set_node_address(world.runtime(actor="test"), "node-1", pair.replica.url)
        wait_for_loss(producer, 2)
        with pytest.raises(AcknowledgedLoss) as raised:
            producer.flush()
        assert {loss.lp: loss.first for loss in raised.value.losses} == {lp_of(b"k"): 4, lp_of(b"other"): 1}


def test_a_restart_that_loses_nothing_is_no_loss(world: World, node: RedisServer) -> None:
    """The producer goes on under its source, whatever it had looked at."""
    with world.producer() as producer:
        source = producer.send("orders", key="k", body=b"0").identity.source
        for _ in range(2):
            look_after_restart(world, node, producer)
        assert producer.flush() == 0
        assert producer.send("orders", key="k", body=b"1").identity == (source, lp_of(b"k"), 2)
        assert producer.stats.lost == 0
