"""Direct publishing on healthy servers: where messages land, in which order, and what is refused at the edge."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from concurrent.futures import Future, wait
from typing import Any

import pytest

from mqlayer.domain.message import Identity
from mqlayer.domain.routing import lp_of
from mqlayer.errors import (
    BodyTooLarge,
    InvalidInput,
    InvalidName,
    KeyTooLarge,
    MqlayerError,
    NotFound,
    ProducerClosed,
    ReservedHeader,
)
from mqlayer.producing import Message, Producer, ProducerOptions, Receipt
from tests.proof.route_ranges import range_of
from tests.proof.world import World

KEYS = ("order-7", "Ωμέγα", "", "注文-42")

pytestmark = pytest.mark.world(partitions=4)


def stored_body(world: World, receipt: Receipt) -> bytes:
    """Return the body of the record that a receipt names."""
    with world.client() as client:
        entries: Any = client.xrange(
            world.keys(receipt.partition).log, f"{receipt.offset}-0", f"{receipt.offset}-0", count=1
        )
    fields = entries[0][1]
    assert fields[b"m"].startswith(f"{receipt.identity}:".encode())
    return bytes(fields[b"b"])


def test_a_message_is_stored_when_send_returns_and_the_receipt_says_where(world: World) -> None:
    """Cases 1 and 11: the partition follows from the key alone; the record is there when the call returns."""
    with world.producer() as producer:
        for number, key in enumerate(KEYS):
            body = f"body-{number}".encode()
            receipt = producer.send("orders", key=key, body=body, headers={"kind": "test", "ü": "ß"})
            assert stored_body(world, receipt) == body
            assert receipt.topic == "orders"
            assert receipt.partition == range_of(world.routes["orders"], lp_of(key.encode())).partition
            assert receipt.identity == Identity(receipt.identity.source, lp_of(key.encode()), 1)
            assert receipt.replicas is None


def test_every_producer_is_a_source_of_its_own_that_ends_with_it(world: World) -> None:
    with world.producer() as one, world.producer() as other:
        first = one.send("orders", key="k", body=b"1").identity
        second = other.send("orders", key="k", body=b"2").identity
        assert first.source != second.source
        assert first.seq == second.seq == 1
        open_ones = world.rows("SELECT source_id FROM mqlayer.source WHERE kind = 'direct' AND closed_at IS NULL")
        assert {row[0] for row in open_ones} == {first.source, second.source}
    assert not world.rows("SELECT 1 FROM mqlayer.source WHERE closed_at IS NULL")


def test_futures_bring_receipts_also_to_coroutines(world: World) -> None:
    with world.producer() as producer:
        futures = [producer.send_async("orders", key="k", body=b"%d" % number) for number in range(50)]
        receipts = [future.result(10) for future in futures]
        assert [receipt.identity.seq for receipt in receipts] == list(range(1, 51))

        async def publish() -> Receipt:
            future = asyncio.wrap_future(producer.send_async("orders", key="k", body=b"50"))
            return await future

        assert asyncio.run(publish()).identity.seq == 51
    assert world.by_key() == {"k": [str(number) for number in range(51)]}


def test_a_cancelled_wait_does_not_take_the_message_back(world: World) -> None:
    with world.producer() as producer:

        async def publish() -> None:
            task = asyncio.ensure_future(asyncio.wrap_future(producer.send_async("orders", key="k", body=b"kept")))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(publish())
        assert producer.flush(10) == 0
    assert world.by_key() == {"k": ["kept"]}


def test_callbacks_of_futures_may_publish_but_not_wait(world: World) -> None:
    refused: list[Exception] = []
    followed: list[Future[Receipt]] = []
    told = threading.Event()
    with world.producer() as producer:

        def follow(_: object) -> None:
            for wait_for in (
                lambda: producer.send("orders", key="k", body=b"x"),
                lambda: producer.send_many("orders", [Message("k", b"x")]),
                producer.flush,
                producer.close,
            ):
                try:
                    wait_for()
                except InvalidInput as error:
                    refused.append(error)
            followed.append(producer.send_async("orders", key="k", body=b"2"))
            told.set()

        producer.send_async("orders", key="k", body=b"1").add_done_callback(follow)
        assert told.wait(10)
        assert followed[0].result(10).identity.seq == 2
        assert len(refused) == 4
    assert world.by_key() == {"k": ["1", "2"]}


def test_one_way_messages_arrive_in_order(world: World) -> None:
    with world.producer() as producer:
        for number in range(200):
            producer.send_oneway("orders", key=f"k{number % 3}", body=b"%d" % number)
        assert producer.flush(10) == 0
        assert producer.stats.stored == 200
    assert world.by_key() == {f"k{k}": [str(n) for n in range(200) if n % 3 == k] for k in range(3)}


def test_ways_of_sending_keep_the_order_of_their_calls(world: World) -> None:
    """What was queued before is stored before, whichever way it was given."""
    expected: list[str] = []

    def body() -> bytes:
        expected.append(str(len(expected)))
        return expected[-1].encode()

    with world.producer() as producer:
        for _ in range(30):
            producer.send_async("orders", key="k", body=body())
            producer.send_many("orders", [Message("k", body()) for _ in range(7)])
            producer.send_oneway("orders", key="k", body=body())
            producer.send("orders", key="k", body=body())
    assert world.by_key() == {"k": expected}


def test_receipts_of_a_batch_name_each_message_in_its_order(world: World) -> None:
    messages = [Message(f"k{number % 37}", f"{number}".encode()) for number in range(2_600)]
    with world.producer() as producer:
        receipts = producer.send_many("orders", messages)
        assert len(receipts) == len(messages)
        places = {(record.partition, record.offset): record for record in world.records()}
        for message, receipt in zip(messages, receipts, strict=True):
            record = places[receipt.partition, receipt.offset or 0]
            assert (record.key, record.value.encode()) == (message.key, message.body)
            assert receipt.identity == (record.source, record.lp, record.seq)
        assert receipts[-1] == list(receipts)[-1] == receipts[2_599:][0]
        assert producer.send_many("orders", [])[:] == []
    assert world.by_key() == {f"k{k}": [str(n) for n in range(2_600) if n % 37 == k] for k in range(37)}


def test_large_messages_go_in_calls_of_a_megabyte(world: World) -> None:
    world.add_topic("large", partitions=1, body_limit=1_000_000)
    sizes = [900_000, 1_000_000, 10, 400_000, 400_000, 400_000, 1]
    messages = [Message("k" * 512, bytes(size), {"h": "x" * 8_000}) for size in sizes]
    with world.producer() as producer:
        receipts = producer.send_many("large", messages)
        assert [receipt.offset for receipt in receipts] == list(range(1, 8))
        for size in sizes:
            producer.send_async("large", key="other", body=bytes(size))
        assert producer.flush(20) == 0
        assert producer.stats.failed == 0
    assert [len(value) for value in world.by_key("large")["other"]] == sizes


def test_headers_reach_the_records(world: World) -> None:
    with world.producer() as producer:
        receipts = producer.send_many("orders", [Message("k", b"a"), Message("k", b"b", {"trace": "1:2", "π": "ü"})])
        with world.client() as client:
            entries: Any = client.xrange(world.keys(receipts[0].partition).log)
    facts = [fields[b"m"].split(b":", 4)[4:] for _, fields in entries]
    assert facts == [[], ['{"trace":"1:2","π":"ü"}'.encode()]]


@pytest.mark.parametrize("way", ["send_many", "send_async"])
def test_10_000_messages_without_a_key_reach_every_partition_evenly(world: World, way: str) -> None:
    """Case 3: each of the four partitions gets a quarter, give or take a tenth (six standard deviations)."""
    with world.producer() as producer:
        if way == "send_many":
            receipts = list(producer.send_many("orders", [Message(None, b"x") for _ in range(10_000)]))
        else:
            receipts = [
                future.result(20) for future in [producer.send_async("orders", body=b"") for _ in range(10_000)]
            ]
        single = producer.send("orders", body=b"y")
    counts = Counter(receipt.partition for receipt in receipts)
    assert set(counts) == {partition for _, partition, _ in world.partitions()}
    assert all(2_250 <= count <= 2_750 for count in counts.values()), counts
    assert single.partition in counts
    assert set(world.by_key()) == {None}


def test_threads_keep_the_order_of_their_keys(world: World) -> None:
    """Eight threads with keys of their own and one in common, in all ways at once."""
    failures: list[BaseException] = []

    with world.producer() as producer:

        def work(thread: int) -> None:
            try:
                for number in range(120):
                    key = "common" if number % 4 == 0 else f"key-{thread}-{number % 3}"
                    body = f"{thread}/{number}".encode()
                    if number % 5 == 0:
                        producer.send_many("orders", [Message(key, body)])
                    elif number % 5 == 1:
                        producer.send_async("orders", key=key, body=body)
                    else:
                        producer.send("orders", key=key, body=body)
            except BaseException as error:  # noqa: BLE001  # handed to the test
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert producer.flush(20) == 0
    assert not failures
    found = world.by_key()
    assert sum(map(len, found.values())) == 8 * 120
    for values in found.values():
        for thread_number in range(8):
            numbers = [int(value.split("/")[1]) for value in values if value.startswith(f"{thread_number}/")]
            assert numbers == sorted(numbers)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"topic": "Orders"}, InvalidName),
        ({"topic": "nobody-made-it"}, NotFound),
        ({"key": "k" * 513}, KeyTooLarge),
        ({"key": 7}, InvalidInput),
        ({"key": "\ud800"}, InvalidInput),
        ({"body": b"x" * 262_145}, BodyTooLarge),
        ({"body": object()}, InvalidInput),
        ({"headers": {"mq-retry": "1"}}, ReservedHeader),
        ({"headers": {"a": "x" * 9_000}}, ReservedHeader),
        ({"headers": {"a": 1}}, ReservedHeader),
    ],
)
def test_what_can_never_work_is_refused_at_the_edge(
    world: World, wrong: dict[str, Any], error: type[MqlayerError]
) -> None:
    message: dict[str, Any] = {"topic": "orders", "key": "k", "body": b"x", "headers": None} | wrong
    topic = message.pop("topic")
    with world.producer() as producer:
        for send in (producer.send, producer.send_async, producer.send_oneway):
            with pytest.raises(error):
                send(topic, **message)
        with pytest.raises(error):
            producer.send_many(topic, [Message("k", b"first"), Message(**message)])
        assert producer.stats.pending == 0
        assert producer.send("orders", key="k", body=bytearray(b"good")).identity.seq == 1
    assert world.by_key() == {"k": ["good"]}


def test_a_batch_of_something_else_is_refused(world: World) -> None:
    with world.producer() as producer, pytest.raises(InvalidInput, match="Message"):
        producer.send_many("orders", [("k", b"x")])  # type: ignore[list-item]


def test_a_closed_producer_says_so_and_closing_it_twice_is_nothing(world: World) -> None:
    with world.producer() as producer:
        future = producer.send_async("orders", key="k", body=b"x")
        producer.close()
        assert future.result(0).offset == 1
        for send in (producer.send, producer.send_async, producer.send_oneway):
            with pytest.raises(ProducerClosed, match="closed"):
                send("orders", key="k", body=b"y")
        with pytest.raises(ProducerClosed):
            producer.send_many("orders", [Message("k", b"y")])
        producer.close()
    assert world.by_key() == {"k": ["x"]}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_producer_in_a_forked_child_says_what_to_do(world: World) -> None:
    with world.producer() as producer:
        producer.send("orders", key="k", body=b"parent")
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                producer.send("orders", key="k", body=b"child")
                answer = "sent"
            except ProducerClosed as error:
                producer.close()
                answer = str(error)
            os.write(writing, answer.encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert "after the fork" in os.read(reading, 1_000).decode()
        os.close(reading)
        os.close(writing)
        assert producer.send("orders", key="k", body=b"parent again").identity.seq == 2


def test_bounds_of_a_producer_are_checked(world: World) -> None:
    for wrong in ({"replicas": -1}, {"max_in_flight": 0}, {"max_pending_messages": 0}, {"replica_timeout_s": 60.0}):
        with pytest.raises(InvalidInput):
            Producer(world.settings(), options=ProducerOptions(**wrong))
    with pytest.raises(InvalidName):
        Producer(world.settings(), name="Not A Name")


@pytest.mark.world(nodes=2, partitions=4)
def test_several_nodes_take_one_batch(world: World) -> None:
    with world.producer() as producer:
        messages = [Message(f"k{number % 97}", b"%d" % number) for number in range(3_000)]
        receipts = producer.send_many("orders", messages)
        futures = [producer.send_async("orders", key=message.key, body=message.body) for message in messages[:500]]
        wait(futures, 20)
        assert {receipt.partition for receipt in receipts} == {partition for _, partition, _ in world.partitions()}
    assert sum(map(len, world.by_key().values())) == 3_500
