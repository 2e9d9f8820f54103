"""Direct publishing with dedup ids: one record per id and key, the first one's place for every repetition."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mqlayer.domain.dedup import IDS_PER_PARTITION, token_of
from mqlayer.domain.message import Identity
from mqlayer.domain.routing import NodeId, PartitionId, Route, lp_of
from mqlayer.errors import BacklogFull, InvalidInput, PartlyPublished
from mqlayer.postgres.database import Database
from mqlayer.producing import Message, Receipt
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.partition_scripts import OnceOutcome, Refused, append_once_reply, create
from mqlayer.redis.wire import append_once_packet, bulk, bulk_number
from mqlayer.routes.dedup_handover import hand_over_ids
from mqlayer.stack import RedisServer
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.servers import StartRedis
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.proxy import TcpProxy
from tests.proof.refused_sends import send_to_the_end
from tests.proof.route_ranges import range_of
from tests.proof.route_steps import merge, move, split
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

pytestmark = pytest.mark.world(proxied=True)


def place(receipt: Receipt) -> tuple[int, int | None, Identity]:
    """Return where a message is, by its receipt."""
    return receipt.partition, receipt.offset, receipt.identity


# Producers


def test_a_second_message_with_an_id_is_not_stored_and_the_answer_is_the_first_ones_place(world: World) -> None:
    """Case 8: whoever sends it again, this producer or one that was started after it died."""
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"0")
        first = producer.send("orders", key="k", body=b"1", dedup_id="pay-7")
        again = producer.send("orders", key="k", body=b"1", dedup_id="pay-7")
        last = producer.send("orders", key="k", body=b"2")
        assert not first.duplicate
        assert again == first._replace(duplicate=True)
        assert last.identity.seq == first.identity.seq + 1
        assert producer.stats.duplicates == 1
    with world.producer() as other:
        assert other.send("orders", key="k", body=b"3").offset == 4
        assert other.send("orders", key="k", body=b"1", dedup_id="pay-7") == again
        assert other.send("orders", key="k", body=b"4").offset == 5
        # Another key's id is another id.
        assert not other.send("orders", key="l", body=b"5", dedup_id="pay-7").duplicate
    assert world.by_key() == {"k": ["0", "1", "2", "3", "4"], "l": ["5"]}


def test_a_message_without_a_key_goes_to_the_lp_of_its_id(world: World) -> None:
    with world.producer() as producer:
        receipts = [producer.send("orders", body=b"x", dedup_id=f"id-{n % 20}") for n in range(40)]
    assert [receipt.identity.lp for receipt in receipts[:20]] == [lp_of(b"id-%d" % n) for n in range(20)]
    assert [place(receipt) for receipt in receipts[:20]] == [place(receipt) for receipt in receipts[20:]]
    assert world.by_key() == {None: ["x"] * 20}


def test_messages_with_and_without_ids_keep_the_order_of_their_key(world: World) -> None:
    """Duplicates in between take no number: what waited behind them is numbered anew before it is sent."""
    with world.producer() as producer:
        futures = []
        for number in range(300):
            dedup_id = None if number % 3 else f"id-{number % 90}"
            futures.append(producer.send_async("orders", key="k", body=b"%d" % number, dedup_id=dedup_id))
        receipts = [future.result(20) for future in futures]
    duplicates = [number for number in range(300) if number % 3 == 0 and number >= 90]
    assert [number for number, receipt in enumerate(receipts) if receipt.duplicate] == duplicates
    assert all(place(receipts[number]) == place(receipts[number % 90]) for number in duplicates)
    assert world.by_key() == {"k": [str(number) for number in range(300) if number not in duplicates]}


def test_a_batch_may_mix_messages_with_and_without_ids(world: World) -> None:
    messages = [Message(f"k-{n % 7}", b"%d" % n, dedup_id=f"id-{n % 10}" if n % 2 else None) for n in range(140)]
    with world.producer() as producer:
        receipts = producer.send_many("orders", messages)
        again = producer.send_many("orders", messages)
        assert [r.duplicate for r in again] == [bool(n % 2) for n in range(140)]
        assert all(place(receipts[n]) == place(again[n]) for n in range(1, 140, 2))
        world.add_topic("small", partitions=1, backlog_limit=2)
        with pytest.raises(PartlyPublished) as raised:
            producer.send_many("small", [Message("k", b"x", dedup_id=str(n)) for n in range(4)], on_backlog="error")
    kinds = [type(outcome).__name__ for outcome in raised.value.outcomes]
    assert kinds == ["Receipt", "Receipt", "BacklogFull", "PublishAborted"]
    assert world.by_key()["k-0"][:4] == ["0", "7", "14", "21"]


@pytest.mark.parametrize("server_bytes", some_of([0, 1, 7], 3))
def test_a_reply_that_is_lost_leaves_one_record_and_the_place_it_had(
    world: World, proxy: TcpProxy, server_bytes: int
) -> None:
    """Case 8: the resend finds its number taken; its id says where."""
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"1", dedup_id="a")
        proxy.cut_after(server_bytes=server_bytes)
        receipt = producer.send("orders", key="k", body=b"2", dedup_id="b")
        proxy.wait_for_cut()
        assert (receipt.offset, receipt.identity.seq, receipt.duplicate) == (2, 2, False)
        assert producer.stats.repeated == 1
        assert producer.send("orders", key="k", body=b"3").identity.seq == 3
    assert world.by_key() == {"k": ["1", "2", "3"]}


def test_a_place_whose_id_was_forgotten_is_found_by_its_identity(world: World, proxy: TcpProxy) -> None:
    with world.producer() as producer:
        first = producer.send("orders", key="k", body=b"1")
        keys = world.keys(first.partition)
        proxy.cut_after(server_bytes=0)
        future = producer.send_async("orders", key="k", body=b"2", dedup_id="b")
        with world.client() as client:
            wait_until(lambda: client.exists(keys.ids), what="the id")
            client.delete(keys.ids, keys.ages)
        assert (future.result(20).partition, future.result(20).offset) == (first.partition, 2)
    assert world.by_key() == {"k": ["1", "2"]}


def test_a_duplicate_whose_first_answer_was_lost_never_gives_its_number_to_another_message(
    world: World, proxy: TcpProxy
) -> None:
    """The lost try may still be on its way, and be worked off when the id is forgotten: a new incarnation."""
    with world.producer() as other:
        other.send("orders", key="k", body=b"0", dedup_id="a")
    with world.producer() as producer:
        before = producer.send("orders", key="k", body=b"1")
        proxy.cut_after(server_bytes=0)
        again = producer.send_async("orders", key="k", body=b"0", dedup_id="a")
        behind = [producer.send_async("orders", key="k", body=b"%d" % n) for n in range(2, 6)]
        proxy.wait_for_cut()
        assert again.result(20).duplicate
        after = [future.result(20).identity for future in behind]
        assert {identity.source for identity in after}.isdisjoint({before.identity.source})
        assert [identity.seq for identity in after] == [1, 2, 3, 4]
        # The lost try arrives when the id is forgotten: a second copy then, and nobody's number is taken.
        with world.client() as client:
            client.delete(world.keys(before.partition).ids, world.keys(before.partition).ages)
        late = Once(world.server_urls[0], world.key_prefix, before.partition)
        token = token_of(b"k", b"a")
        assert late.words((before.identity.lp, 2, token), source=before.identity.source) == ["ok"]
        late.connection.close()
        assert producer.send("orders", key="k", body=b"6").identity.seq == 5
    assert world.by_key() == {"k": ["0", "1", "2", "3", "4", "5", "body", "6"]}


PROGRAM = """
from mqlayer.producing import Producer
with Producer(name="shop") as producer:
    for number in range(200):
        producer.send("orders", key=f"k{number % 5}", body=b"%d" % number, dedup_id=f"job-{number}")
"""


@pytest.mark.parametrize("name", some_of(["producer.before_append", "producer.after_send", "producer.after_reply"], 3))
def test_who_does_the_work_of_a_killed_process_again_stores_each_message_once(world: World, name: str) -> None:
    """Case 8: whatever the first one had sent, stored or heard of."""
    addresses = {"MQLAYER_DSN": world.dsn, "MQLAYER_KEY_PREFIX": world.key_prefix}
    killed = {**os.environ, **addresses, **armed(f"{name}=kill@57")}
    assert ask_python("-c", PROGRAM, env=killed).returncode == -signal.SIGKILL
    with world.producer() as producer:
        receipts = producer.send_many(
            "orders", [Message(f"k{number % 5}", b"%d" % number, dedup_id=f"job-{number}") for number in range(200)]
        )
    assert [receipt.duplicate for receipt in receipts] == sorted((r.duplicate for r in receipts), reverse=True)
    assert sum(receipt.duplicate for receipt in receipts) in (56, 57)
    assert world.by_key() == {f"k{k}": [str(n) for n in range(200) if n % 5 == k] for k in range(5)}


@pytest.mark.parametrize("bad", ["", "x" * 129, "a\0b", "\ud800", 7, b"id"])
def test_what_is_no_id_is_refused_at_the_edge(world: World, bad: Any) -> None:
    with world.producer() as producer:
        with pytest.raises(InvalidInput, match="dedup id"):
            producer.send("orders", key="k", body=b"x", dedup_id=bad)
        with pytest.raises(InvalidInput, match="dedup id"):
            producer.send_many("orders", [Message("k", b"x"), Message("k", b"x", dedup_id=bad)])
        assert producer.stats.pending == 0
    assert world.by_key() == {}


@pytest.mark.world(partitions=1, backlog_limit=1)
def test_a_refused_message_with_an_id_fails_as_others_do(world: World) -> None:
    with world.producer() as producer:
        first = producer.send("orders", key="k", body=b"1", dedup_id="a")
        with pytest.raises(BacklogFull):
            send_to_the_end(producer, "orders", key="k", body=b"2", dedup_id="b", timeout_s=0.3)
        with world.client() as client:
            client.xtrim(world.keys(first.partition).log, maxlen=0)
        assert producer.send("orders", key="k", body=b"2", dedup_id="b").identity.seq == 2


# Route changes


@pytest.mark.world(nodes=2, partitions=1)
def test_ids_go_with_their_lps_over_split_move_and_merge(world: World, database_dsn: str, key_prefix: str) -> None:
    """Case 8: the first copy is in the parent, the retry reaches the child, also on another node."""
    keys = [f"key-{number}" for number in range(30)]

    def send(body: bytes) -> list[Receipt]:
        # A producer of the time before and one that is newly started.
        return [sender.send("orders", key=key, body=body, dedup_id="once") for sender in (old, new) for key in keys]

    with world.producer() as old, Database(database_dsn) as database:
        first = {key: old.send("orders", key=key, body=b"1", dedup_id="once") for key in keys}
        changes: list[Callable[[], Route]] = [
            lambda: split(runtime_of(database, key_prefix), "orders", PartitionId(1), at=[300]),
            lambda: move(runtime_of(database, key_prefix), "orders", PartitionId(2), to="node-2"),
            lambda: merge(runtime_of(database, key_prefix), "orders", [PartitionId(4), PartitionId(3)]),
        ]
        for change in changes:
            route = change()
            with world.producer() as new:
                repeated = send(b"2")
                assert all(receipt.duplicate for receipt in repeated)
                assert [place(receipt) for receipt in repeated] == [place(first[key]) for key in keys] * 2
                fresh = new.send("orders", key="key-0", body=b"9", dedup_id=f"of version {route.version}")
                assert fresh.partition == range_of(route, lp_of(b"key-0")).partition
    assert {key: values[:1] for key, values in world.by_key().items()} == {key: ["1"] for key in keys}
    assert world.by_key()["key-0"] == ["1", "9", "9", "9"]


def test_a_change_goes_on_although_a_sealed_parents_node_went_away(
    database_dsn: str, redis_url: str, start_redis: StartRedis, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ids are forgotten then; its marks are in Postgres, so nothing is lost or out of order."""
    server = start_redis()
    world = World(database_dsn, key_prefix, [server.url, redis_url])
    world.add_topic(partitions=1)
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"1", dedup_id="a")

    def after_its_death(*arguments: Any, **named: Any) -> int:
        server.kill()
        return hand_over_ids(*arguments, **named)

    monkeypatch.setattr("mqlayer.routes.change_driver.hand_over_ids", after_its_death)
    with Database(database_dsn) as database:
        route = move(runtime_of(database, key_prefix), "orders", PartitionId(1), to="node-2")
    with world.producer() as producer:
        receipt = producer.send("orders", key="k", body=b"2", dedup_id="a")
        assert (receipt.partition, receipt.duplicate) == (route.ranges[0].partition, False)


# The script


class Once:
    """A partition of all LPs, and the script on it."""

    def __init__(self, url: str, prefix: str, partition: int = 1) -> None:
        self.connection = NodeConnection(Node(NodeId(1), "n", url, None), any_run=True)
        self.prefix, self.partition = prefix, partition

    def __call__(
        self, *messages: tuple[int, int, bytes], source: int = 5, window_ms: int = 60_000, backlog: int = 0
    ) -> list[OnceOutcome] | Refused:
        pieces = [
            piece
            for lp, seq, token in messages
            for piece in (bulk_number(lp), bulk_number(seq), bulk(token), bulk(b"17"), bulk(b"k"), bulk(b"body"))
        ]
        packet = append_once_packet(
            self.connection,
            self.prefix,
            self.partition,
            source,
            pieces,
            count=len(messages),
            backlog=backlog,
            window_ms=window_ms,
        )
        self.connection.send_packet(packet)
        return append_once_reply(self.connection.receive(1)[0], "the node")

    def words(self, *messages: tuple[int, int, bytes], **options: Any) -> list[str]:
        answer = self(*messages, **options)
        assert isinstance(answer, list), answer
        return [outcome.status for outcome in answer]

    def do(self, *words: Any) -> Any:
        return self.connection.call([words])[0]


@pytest.fixture
def once(every_redis: RedisServer, key_prefix: str) -> Iterator[Once]:
    """A partition on each version of Redis."""
    once = Once(every_redis.url, key_prefix)
    create(once.connection, key_prefix, 1, "orders", 0, 100, "open", "")
    yield once
    once.connection.close()


def test_each_message_of_a_call_has_its_own_answer(once: Once) -> None:
    assert once.words((1, 1, b"a"), (2, 1, b"b")) == ["ok", "ok"]
    answer = once((1, 2, b"a"), (2, 1, b"c"), (3, 2, b"d"), (100, 1, b"e"), (4, 1, b"b"), (5, 1, b"f"))
    assert isinstance(answer, list)
    assert [outcome.status for outcome in answer] == ["same", "dup", "gap", "unowned", "same", "ok"]
    assert [outcome.first and outcome.first.identity for outcome in answer] == [
        Identity(5, 1, 1), None, None, None, Identity(5, 2, 1), None,
    ]  # fmt: skip
    assert (answer[2].mark, answer[5].offset) == (0, 3)
    assert once.do("XLEN", f"{once.prefix}:{{1}}:log") == 3
    assert once.do("HGET", f"{once.prefix}:{{1}}:marks", "5:1") == b"1"


def test_a_repeated_call_changes_nothing(once: Once) -> None:
    before = once((1, 1, b"a"), (2, 1, b"b"))
    again = once((1, 1, b"a"), (2, 1, b"b"))
    assert isinstance(before, list)
    assert isinstance(again, list)
    assert [outcome.status for outcome in again] == ["dup", "dup"]
    assert [outcome.first and outcome.first.offset for outcome in again] == [o.offset for o in before]


def test_ids_are_forgotten_when_they_are_older_than_the_window_and_with_the_last_of_them(once: Once) -> None:
    ages = f"{once.prefix}:{{1}}:ages"
    once((1, 1, b"old"), (2, 1, b"new"))
    once.do("ZINCRBY", ages, -60_001, b"old")
    assert once.words((1, 2, b"old")) == ["same"]
    assert once.words((3, 1, b"x")) == ["ok"]
    assert once.words((1, 2, b"old"), (2, 2, b"new")) == ["ok", "same"]
    assert 0 < once.do("PTTL", ages) <= 60_000
    assert 0 < once.do("PTTL", f"{once.prefix}:{{1}}:ids") <= 60_000


def test_of_too_many_ids_the_oldest_are_forgotten(once: Once, monkeypatch: pytest.MonkeyPatch) -> None:
    assert IDS_PER_PARTITION == 100_000
    monkeypatch.setattr("mqlayer.redis.wire.IDS_PER_PARTITION", 3)
    ages = f"{once.prefix}:{{1}}:ages"
    for number in range(1, 7):
        once((1, number, b"id-%d" % number))
        once.do("ZINCRBY", ages, 1_000 * (number - 10), b"id-%d" % number)
    assert once.do("ZRANGE", ages, 0, -1) == [b"id-4", b"id-5", b"id-6"]
    assert once.do("HLEN", f"{once.prefix}:{{1}}:ids") == 3


def test_what_can_not_be_done_changes_nothing(once: Once) -> None:
    once((1, 1, b"a"))
    assert once((1, 2, b"b"), backlog=1) == Refused("full", "1")
    assert once(*((lp % 100, 2, b"%d" % lp) for lp in range(501))) == Refused("too_large", "501")
    once.do("HSET", f"{once.prefix}:{{1}}:meta", "state", "sealed", "sealed_for", "7")
    assert once((1, 2, b"b")) == Refused("sealed", "7")
    once.do("DEL", f"{once.prefix}:{{1}}:meta")
    assert once((1, 2, b"b")) == Refused("absent", "")
    assert once.do("XLEN", f"{once.prefix}:{{1}}:log") == 1
