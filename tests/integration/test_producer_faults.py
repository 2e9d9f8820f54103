"""Direct publishing while connections break, servers stop and partitions refuse: each message once, in order, or an
error."""

from __future__ import annotations

import gc
import signal
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from mqlayer.domain.routing import lp_of
from mqlayer.errors import (
    AcknowledgedLoss,
    BacklogFull,
    ConfigurationRefused,
    NodeOutOfMemory,
    NotReplicated,
    PartlyPublished,
    ProducerClosed,
    ProducerFull,
    PublishAborted,
    PublishUnknown,
    SchemaMismatch,
    StoreUnavailable,
)
from mqlayer.failpoints import FailpointHit, arm
from mqlayer.logs import event_of
from mqlayer.postgres.migrations import migrate
from mqlayer.producing import Message, Producer
from mqlayer.producing.listeners import ReceiptFuture
from mqlayer.settings import Settings
from mqlayer.stack import RedisProgram, RedisServer
from tests.fixtures.backups import Backup
from tests.fixtures.servers import StartPostgres, StartRedis, different_redis_programs
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.proxy import TcpProxy
from tests.proof.refused_sends import send_to_the_end
from tests.proof.route_ranges import range_of
from tests.proof.world import World

pytestmark = pytest.mark.world(proxied=True)


def other_partition_key(world: World, key: str, topic: str = "orders") -> str:
    """Return a key whose messages go to another partition than those of this key."""
    route = world.routes[topic]
    home = range_of(route, lp_of(key.encode())).partition
    names = (f"other-{number}" for number in range(1_000))
    return next(name for name in names if range_of(route, lp_of(name.encode())).partition != home)


# Lines


@pytest.mark.parametrize("server_bytes", some_of([0, 1, 7], 3))
def test_a_reply_that_is_lost_leaves_the_message_stored_once_at_its_first_place(
    world: World, proxy: TcpProxy, server_bytes: int
) -> None:
    """Case 8: the resend is answered `dup`, and the receipt names the original position."""
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"1")
        proxy.cut_after(server_bytes=server_bytes)
        receipt = producer.send("orders", key="k", body=b"2")
        proxy.wait_for_cut()
        assert (receipt.offset, receipt.identity.seq) == (2, 2)
        assert producer.stats.repeated == 1
        assert producer.send("orders", key="k", body=b"3").offset == 3
    assert world.by_key() == {"k": ["1", "2", "3"]}


@pytest.mark.world(own_node=True)
def test_a_place_that_can_not_be_asked_for_is_told_and_the_message_counts_as_stored(
    world: World, node: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Between the answer `dup` and the search the node gets settings under which nobody connects to it."""
    going_on, reached = tmp_path / "go-on", tmp_path / "reached"
    with TcpProxy("127.0.0.1", node.port) as way:
        world.rows(f"UPDATE mqlayer.node SET url = 'redis://{way.host}:{way.port}/0'")
        with world.producer() as producer, world.client() as client:
            producer.send("orders", key="k", body=b"1")
            arm("producer.after_reply", f"mark:{reached}")
            arm("producer.after_reply", f"wait:{going_on}")
            way.cut_after(server_bytes=0)
            future = producer.send_async("orders", key="k", body=b"2")
            way.wait_for_cut()
            wait_until(reached.exists, what="the answer to the repeated call")
            assert len(world.by_key()["k"]) == 2
            client.config_set("maxmemory-policy", "allkeys-lru")
            going_on.touch()
            receipt = future.result(20)
            client.config_set("maxmemory-policy", "noeviction")
            assert (receipt.offset, receipt.identity.seq) == (None, 2)
            assert producer.send("orders", key="k", body=b"3").offset == 3
    reasons = [str(r.__dict__["reason"]) for r in caplog.records if event_of(r) == "position_not_found"]
    assert reasons
    assert all("maxmemory-policy" in reason for reason in reasons)


@pytest.mark.parametrize("client_bytes", [0, 100])
def test_a_request_that_is_lost_is_sent_again(world: World, proxy: TcpProxy, client_bytes: int) -> None:
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"1")
        proxy.cut_after(client_bytes=client_bytes)
        assert producer.send("orders", key="k", body=b"2").offset == 2
        assert producer.stats.repeated == 0
    assert world.by_key() == {"k": ["1", "2"]}


def test_a_batch_whose_reply_is_lost_is_stored_once(world: World, proxy: TcpProxy) -> None:
    """Case 9, and its receipts name the first places."""
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"0")
        proxy.cut_after(server_bytes=0)
        receipts = producer.send_many("orders", [Message("k", body) for body in (b"1", b"2", b"3")])
        assert [receipt.offset for receipt in receipts] == [2, 3, 4]
        assert producer.stats.repeated == 3
    assert world.by_key() == {"k": ["0", "1", "2", "3"]}


@pytest.mark.full
def test_batches_under_way_while_connections_break_are_stored_once_and_in_order(world: World, proxy: TcpProxy) -> None:
    messages = [Message(f"k{number % 150}", b"%d" % number) for number in range(6_000)]
    with world.producer() as producer:
        producer.send("orders", key="first", body=b"x")
        proxy.cut_after(server_bytes=30, times=4)
        receipts = producer.send_many("orders", messages, timeout_s=60)
        assert proxy.cut_count == 4
        places = {(record.partition, record.offset): record.value for record in world.records()}
        for message, receipt in zip(messages, receipts, strict=True):
            assert receipt.offset is not None
            assert places[receipt.partition, receipt.offset].encode() == message.body
    found = world.by_key()
    del found["first"]
    assert found == {f"k{k}": [str(n) for n in range(6_000) if n % 150 == k] for k in range(150)}


def test_an_outcome_that_is_late_is_told_by_the_future_of_the_error(world: World, proxy: TcpProxy) -> None:
    """Cases 7 and 10: what is published behind it is not stored before it."""
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"1")
        proxy.blackhole("client_to_server")
        with pytest.raises(PublishUnknown, match="do not publish it again") as raised:
            producer.send("orders", key="k", body=b"2", timeout_s=0.2)
        behind = producer.send_async("orders", key="k", body=b"3")
        with pytest.raises(PublishUnknown):
            producer.send("orders", key="k", body=b"4", timeout_s=0.2)
        late = raised.value.future
        assert late is not None
        assert not late.done()
        proxy.heal()
        assert late.result(20).offset == 2
        assert behind.result(20).offset == 3
    assert world.by_key() == {"k": ["1", "2", "3", "4"]}


def test_a_batch_whose_outcome_is_late_says_so_for_each_message(world: World, proxy: TcpProxy) -> None:
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"0")
        proxy.blackhole("server_to_client")
        with pytest.raises(PartlyPublished) as raised:
            producer.send_many("orders", [Message("k", b"1"), Message("k", b"2"), Message("l", b"3")], timeout_s=0.3)
        assert [type(outcome) for outcome in raised.value.outcomes] == [PublishUnknown] * 3
        assert [outcome.seq for outcome in raised.value.outcomes] == [2, 3, 1]
        proxy.heal()
        assert producer.flush(20) == 0
        assert producer.send("orders", key="k", body=b"4").identity.seq == 4
    assert world.by_key() == {"k": ["0", "1", "2", "4"], "l": ["3"]}


def test_a_node_that_does_not_answer_holds_up_only_its_own_lps(
    database_dsn: str, redis_url: str, key_prefix: str, proxy: TcpProxy, start_redis: StartRedis
) -> None:
    other = start_redis().url
    world = World(database_dsn, key_prefix, [other, f"redis://{proxy.host}:{proxy.port}/0"], [other, redis_url])
    route = world.add_topic(partitions=2)
    names = [f"k{number}" for number in range(100)]
    stuck = [name for name in names if range_of(route, lp_of(name.encode())).node == 2]
    with world.producer() as producer:
        producer.send_many("orders", [Message(name, b"0") for name in names])
        proxy.blackhole()
        futures = {name: producer.send_async("orders", key=name, body=b"1") for name in names}
        wait([futures[name] for name in names if name not in stuck], 20)
        assert [name for name in names if not futures[name].done()] == stuck
        proxy.heal()
        wait(list(futures.values()), 20)
    assert world.by_key() == {name: ["0", "1"] for name in names}


@pytest.mark.parametrize("name", some_of(["producer.before_append", "producer.after_send", "producer.after_reply"], 3))
def test_an_interrupted_call_leaves_its_message_queued(world: World, name: str) -> None:
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"1")
        arm(name, "raise")
        with pytest.raises(FailpointHit):
            producer.send("orders", key="k", body=b"2")
        arm(name, "raise", occurrence=3)
        futures = [producer.send_async("orders", key="k", body=b"%d" % number) for number in range(3, 40)]
        wait(futures, 20)
    assert world.by_key() == {"k": [str(number) for number in range(1, 40)]}


# Servers


def test_scripts_that_a_server_forgot_are_loaded_again(
    every_redis: RedisServer, database_dsn: str, key_prefix: str
) -> None:
    world = World(database_dsn, key_prefix, [every_redis.url])
    world.add_topic(partitions=1)
    expected = [str(number) for number in range(3_000)]
    with world.producer() as producer, world.client() as client:
        producer.send("orders", key="k", body=b"0")
        client.script_flush()
        producer.send("orders", key="k", body=b"1")
        client.script_flush()
        producer.send_async("orders", key="k", body=b"2").result(20)
        client.script_flush()
        producer.send_many("orders", [Message("k", text.encode()) for text in expected[3:]])
    assert world.by_key() == {"k": expected}


@pytest.mark.world(own_node=True)
def test_a_redis_that_is_killed_and_armed_again_has_each_message_once_and_in_order(
    world: World, node: RedisServer
) -> None:
    stop = threading.Event()
    sent: dict[str, int] = dict.fromkeys(("a", "b", "c"), 0)
    with world.producer(delivery_timeout_s=60) as producer:

        def publish() -> None:
            while not stop.is_set():
                for key, number in list(sent.items()):
                    producer.send_async("orders", key=key, body=b"%d" % number)
                    sent[key] = number + 1
                if sum(sent.values()) % 30 == 0:
                    producer.send("orders", key="d", body=b"d")

        thread = threading.Thread(target=publish)
        thread.start()
        for _ in range(2):
            before = producer.stats.stored
            wait_until(lambda: producer.stats.stored > before + 100, what="messages to be stored")  # noqa: B023
            node.kill()
            wait_until(lambda: producer.stats.pending > 0, what="messages to wait")
            node.start()
            world.arm_node()
        stop.set()
        thread.join(60)
        assert producer.flush(60) == 0
        assert producer.stats.failed == producer.stats.lost == 0
    found = world.by_key()
    assert {key: found[key] for key in sent} == {key: [str(n) for n in range(count)] for key, count in sent.items()}


@pytest.mark.world(own_node=True)
def test_a_node_that_is_away_is_named_and_what_was_queued_arrives_later(world: World, node: RedisServer) -> None:
    with world.producer() as producer:
        node.kill()
        with pytest.raises(PublishUnknown, match=f"127.0.0.1:{node.port}") as raised:
            producer.send("orders", key="k", body=b"1", timeout_s=2)
        node.start()
        sent = [b"1"]

        def refusal() -> str:
            sent.append(b"%d" % (len(sent) + 1))
            with pytest.raises(PublishUnknown) as later:
                producer.send("orders", key="k", body=sent[-1], timeout_s=0.5)
            return str(later.value)

        # Until its line is tried once more it is the failed connection that is named.
        wait_until(lambda: "not the armed one" in refusal(), what="a refusal by the run")
        world.arm_node()
        assert raised.value.future is not None
        assert raised.value.future.result(20).offset == 1
        assert producer.flush(20) == 0
    assert world.by_key() == {"k": [body.decode() for body in sent]}


@pytest.mark.world(own_node=True)
def test_settings_that_void_the_promise_stop_publishing(world: World, node: RedisServer) -> None:
    with world.producer() as producer, world.client() as client:
        producer.send("orders", key="k", body=b"1")
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises((ConfigurationRefused, PublishUnknown)):
            producer.send("orders", key="k", body=b"in between", timeout_s=5)
        with pytest.raises(ConfigurationRefused, match="maxmemory-policy noeviction"):
            producer.send("orders", key="l", body=b"x", timeout_s=5)
        client.config_set("maxmemory-policy", "noeviction")
        assert producer.send("orders", key="l", body=b"2").identity.seq == 1
        assert producer.flush(20) == 0
    assert world.by_key()["l"] == ["2"]


@pytest.mark.world(own_node=True)
def test_messages_that_a_node_lost_after_it_acknowledged_them_are_an_error(
    world: World, node: RedisServer, tmp_path: Path
) -> None:
    """DESIGN 9. The lost seqs are not given out again: groups may have handled the lost messages."""
    with world.producer() as producer:
        bystander = other_partition_key(world, "k")
        old = producer.send_many("orders", [Message("k", b"kept %d" % number) for number in range(3)])[0]
        producer.send_many("orders", [Message(bystander, b"%d" % number) for number in range(3)])
        fall_back_to_here = Backup(node, world.arm_node, tmp_path / "backup")
        for number in range(2):
            producer.send("orders", key="k", body=b"lost %d" % number)
        fall_back_to_here.restore()

        with pytest.raises(AcknowledgedLoss, match="4 to 5") as raised:
            producer.send("orders", key="k", body=b"notices", timeout_s=20)
        assert (raised.value.first_lost, raised.value.last_lost) == (4, 5)
        assert producer.stats.lost == 2
        again = producer.send("orders", key="k", body=b"goes on", timeout_s=20)
        assert again.identity.seq == 1
        assert again.identity.source != old.identity.source
        assert producer.send("orders", key=bystander, body=b"3").identity.seq == 4
        fresh = producer.send("orders", key="new", body=b"x")
        assert fresh.identity.source == again.identity.source
    assert world.by_key()["k"] == ["kept 0", "kept 1", "kept 2", "goes on"]
    assert world.by_key()[bystander] == ["0", "1", "2", "3"]
    assert not world.rows("SELECT 1 FROM mqlayer.source WHERE closed_at IS NULL")


@pytest.mark.world(own_node=True)
def test_what_waits_behind_a_message_that_notices_a_loss_is_not_sent(
    world: World, node: RedisServer, tmp_path: Path
) -> None:
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"1")
        fall_back_to_here = Backup(node, world.arm_node, tmp_path / "backup")
        producer.send("orders", key="k", body=b"2")
        fall_back_to_here.stop()
        futures = [producer.send_async("orders", key="k", body=b"%d" % number) for number in range(3, 6)]
        fall_back_to_here.restore()
        errors = [future.exception(20) for future in futures]
        assert [type(error) for error in errors] == [AcknowledgedLoss, PublishAborted, PublishAborted]
        producer.send("orders", key="k", body=b"6", timeout_s=20)
    assert world.by_key() == {"k": ["1", "6"]}


# Refusals


@pytest.mark.world(backlog_limit=4)
def test_a_full_partition_refuses_after_the_time_and_nothing_overtakes(world: World) -> None:
    with world.producer() as producer, world.client() as client:
        bystander = other_partition_key(world, "k")
        full = producer.send_many("orders", [Message("k", b"%d" % number) for number in range(4)])[0].partition
        with pytest.raises(BacklogFull, match="limit of 4"):
            send_to_the_end(producer, "orders", key="k", body=b"refused", timeout_s=0.3)
        assert producer.send("orders", key=bystander, body=b"goes on").offset == 1

        waiting = producer.send_async("orders", key="k", body=b"4", timeout_s=60)
        client.xtrim(world.keys(full).log, maxlen=2, approximate=False)
        assert waiting.result(20).identity.seq == 5
        assert producer.send("orders", key="k", body=b"5").identity.seq == 6

        head = producer.send_async("orders", key="k", body=b"6", timeout_s=0.5)
        behind = producer.send_async("orders", key="k", body=b"7", timeout_s=60)
        with pytest.raises(BacklogFull):
            head.result(20)
        with pytest.raises(PublishAborted, match="limit of 4"):
            behind.result(20)
        with pytest.raises(PartlyPublished) as raised:
            producer.send_many(
                "orders", [Message("k", b"6"), Message(bystander, b"too"), Message("k", b"7")], timeout_s=3
            )
        # A try that is under way at the end of the time is refused a moment later.
        assert isinstance(raised.value.outcomes[0], BacklogFull | PublishUnknown)
        assert raised.value.outcomes[1].offset == 2
        assert isinstance(raised.value.outcomes[2], BacklogFull | PublishAborted | PublishUnknown)
        assert raised.value.stored == 1
        assert producer.flush(20) == 0
        client.xtrim(world.keys(full).log, maxlen=0, approximate=False)
        assert producer.send("orders", key="k", body=b"last").identity.seq == 7
        assert producer.stats.pending == 0


@pytest.mark.world(proxied=True, partitions=1, backlog_limit=3)
def test_a_message_that_may_be_stored_is_not_refused_for_good(world: World, proxy: TcpProxy) -> None:
    """Its first try was stored and made the partition full, so the second one is refused. Had it failed, its seq would
    go to the next message, which the node would take for a repetition and not store."""
    with world.producer() as producer, world.client() as client:
        producer.send_many("orders", [Message("k", b"1"), Message("k", b"2")])
        proxy.cut_after(server_bytes=0)
        with pytest.raises(PublishUnknown) as raised:
            producer.send("orders", key="k", body=b"3", timeout_s=1)
        with pytest.raises(BacklogFull):
            send_to_the_end(producer, "orders", key="k", body=b"refused", timeout_s=0.3)
        client.xtrim(world.keys(1).log, maxlen=1, approximate=False)
        assert raised.value.future is not None
        assert raised.value.future.result(20).offset == 3
        assert producer.send("orders", key="k", body=b"4").identity.seq == 4
        found: Any = client.xrange(world.keys(1).log)
    assert [fields[b"b"] for _, fields in found] == [b"3", b"4"]


@pytest.mark.parametrize("program", some_of(different_redis_programs(), 9), ids=str)
def test_publishing_waits_while_redis_is_out_of_memory(
    start_redis: StartRedis, program: RedisProgram, database_dsn: str, key_prefix: str
) -> None:
    """Case 10: a busy node; what is behind a message that it refused is not stored before it, nor without it."""
    server = start_redis(program=program)
    world = World(database_dsn, key_prefix, [server.url])
    world.add_topic(partitions=1)
    with world.producer() as producer, world.client() as client:
        producer.send("orders", key="k", body=b"1")
        client.setrange("filler", 20_000_000, b"x")
        info: Any = client.info("memory")
        client.config_set("maxmemory", info["used_memory"] - 5_000_000)
        refused = producer.send_async("orders", key="k", body=b"refused", timeout_s=0.3)
        behind = producer.send_async("orders", key="k", body=b"behind", timeout_s=20)
        with pytest.raises(NodeOutOfMemory, match="out of memory"):
            refused.result(20)
        assert isinstance(behind.exception(20), PublishAborted)
        waiting = producer.send_async("orders", key="k", body=b"2", timeout_s=60)
        wait_until(lambda: producer.stats.pending == 1, what="the message to wait")
        client.delete("filler")
        assert waiting.result(20).identity.seq == 2
        producer.send_many("orders", [Message("k", b"3"), Message("k", b"4")])
    assert world.by_key() == {"k": ["1", "2", "3", "4"]}


def known_futures() -> set[ReceiptFuture]:
    return {one for one in gc.get_objects() if type(one) is ReceiptFuture}


@pytest.mark.world(own_node=True)
def test_a_producer_holds_no_more_than_its_bounds(
    world: World, node: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mqlayer.producing.guarded_in_flight.ROOM_TIMEOUT_S", 0.2)
    with world.producer(options={"max_pending_messages": 5}) as producer:
        producer.send("orders", key="k", body=b"0")
        node.send(signal.SIGSTOP)
        earlier = known_futures()
        futures = [producer.send_async("orders", key="k", body=b"%d" % number) for number in range(1, 6)]
        with pytest.raises(ProducerFull, match="5 messages"):
            producer.send_async("orders", key="k", body=b"no room")
        # A refused message's future would stay for good: the garbage collector skips its pending send.
        assert len(known_futures() - earlier) == len(futures)
        with pytest.raises(ProducerFull):
            producer.send("orders", key="l", body=b"no room")
        with pytest.raises(PartlyPublished) as raised:
            producer.send_many("orders", [Message("l", b"no"), Message("l", b"room")], timeout_s=0.2)
        assert [type(outcome) for outcome in raised.value.outcomes] == [ProducerFull, ProducerFull]
        producer.send_oneway("orders", key="k", body=b"dropped")
        assert producer.stats.failed == 1
        node.send(signal.SIGCONT)
        wait(futures, 20)
        assert producer.send_many("orders", [Message("l", b"%d" % number) for number in range(20)])[-1].offset
    assert world.by_key() == {"k": [str(number) for number in range(6)], "l": [str(number) for number in range(20)]}


@pytest.mark.world(own_node=True)
def test_a_producer_bounds_bytes_too_but_takes_any_one_message(world: World, node: RedisServer) -> None:
    with world.producer(options={"max_pending_bytes": 1_000}) as producer:
        producer.send("orders", key="k", body=bytes(5_000))
        node.send(signal.SIGSTOP)
        first = producer.send_async("orders", key="k", body=bytes(900))
        with pytest.raises(ProducerFull):
            producer.send_async("orders", key="k", body=bytes(200), timeout_s=0.2)
        node.send(signal.SIGCONT)
        assert first.result(20).offset == 2


@pytest.mark.world(own_node=True)
def test_closing_with_messages_unsettled_fails_them(world: World, node: RedisServer) -> None:
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"0")
        node.send(signal.SIGSTOP)
        future = producer.send_async("orders", key="k", body=b"1")
        assert producer.flush(0.1) == 1
        closing = threading.Thread(target=producer.close, args=(0.1,))
        closing.start()
        with pytest.raises(ProducerClosed, match="may or may not be stored"):
            future.result(40)
        node.send(signal.SIGCONT)
        closing.join(20)


# Replicas


@pytest.mark.world(own_node=True)
def test_receipts_say_how_many_replicas_received_the_message(
    world: World, node: RedisServer, start_redis: StartRedis
) -> None:
    """Case 11."""
    replica = start_redis(options={"replicaof": f"127.0.0.1 {node.port}"})
    with world.client() as client:
        wait_until(lambda: client.wait(1, 100) == 1, what="the replica to follow")
    with (
        world.producer(options={"replicas": 1, "replica_timeout_s": 5.0}) as willing,
        world.producer(options={"replicas": 1, "require_replicas": True, "replica_timeout_s": 0.5}) as strict,
    ):
        assert willing.send("orders", key="k", body=b"1").replicas == 1
        assert [r.replicas for r in willing.send_many("orders", [Message("k", b"2"), Message("l", b"x")])] == [1, 1]
        wait_until(lambda: is_replicated(strict), what="a replicated message")
        before = strict.stats.unreplicated
        replica.kill()
        with pytest.raises(NotReplicated, match="stored, but 0 of 1"):
            strict.send("orders", key="s", body=b"2")
        with pytest.raises(NotReplicated):
            strict.send_async("orders", key="s", body=b"3").result(20)
        with pytest.raises(PartlyPublished) as raised:
            strict.send_many("orders", [Message("s", b"4"), Message("s", b"5")])
        assert [type(outcome) for outcome in raised.value.outcomes] == [NotReplicated, NotReplicated]
        assert strict.stats.unreplicated == before + 4
    with world.producer(options={"replicas": 1, "replica_timeout_s": 0.1}) as willing:
        assert willing.send("orders", key="k", body=b"3").replicas == 0
    found = world.by_key()
    assert found["k"] == ["1", "2", "3"]
    assert found["s"][-4:] == ["2", "3", "4", "5"]


def is_replicated(producer: Producer) -> bool:
    """Send a message; say whether the replica had it in time."""
    try:
        return producer.send("orders", key="s", body=b"1").replicas == 1
    except NotReplicated:
        return False


# Postgres


def test_without_postgres_a_producer_does_not_start_and_names_the_address() -> None:
    settings = Settings(dsn=SecretStr("postgresql://someone:secret@127.0.0.1:1/shop"))
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1/shop") as raised:
        Producer(settings)
    assert "secret" not in str(raised.value)


def test_without_the_schema_a_producer_says_what_to_run(empty_database_dsn: str) -> None:
    with pytest.raises(SchemaMismatch, match="mqlayer migrate"):
        Producer(Settings(dsn=SecretStr(empty_database_dsn)))


@pytest.mark.slow
def test_publishing_goes_on_while_postgres_is_away(
    start_postgres: StartPostgres, redis_url: str, key_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    postgres = start_postgres()
    dsn = postgres.create_database("control")
    migrate(dsn)
    world = World(dsn, key_prefix, [redis_url])
    world.add_topic(partitions=1)
    world.add_topic("unseen", partitions=1)
    producer = Producer(world.settings(), name="test")
    producer.send("orders", key="k", body=b"1")
    postgres.stop()
    assert producer.send("orders", key="k", body=b"2").offset == 2
    producer.send_many("orders", [Message("k", b"3")])
    with pytest.raises(StoreUnavailable):
        producer.send("unseen", key="k", body=b"x")
    producer.close()
    assert "source_not_closed" in caplog.text
    postgres.start()
    assert world.by_key() == {"k": ["1", "2", "3"]}
