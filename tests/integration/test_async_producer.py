"""Publishing from an event loop: order, back-pressure, cancellation, and stores that stop or go away."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

import mqlayer
from mqlayer.errors import (
    AcknowledgedLoss,
    BacklogFull,
    BodyTooLarge,
    InvalidInput,
    MqlayerError,
    NotFound,
    PartlyPublished,
    ProducerClosed,
    ProducerFull,
    PublishUnknown,
    StoreUnavailable,
)
from mqlayer.failpoints import arm
from mqlayer.producing import AsyncProducer, Message, ProducerOptions, Receipt
from mqlayer.producing.send_queues import TopicQueues
from mqlayer.stack import RedisServer
from tests.fixtures.wait import wait_until
from tests.proof.proxy import TcpProxy
from tests.proof.world import World

pytestmark = pytest.mark.world(own_node=True)


@asynccontextmanager
async def started(world: World, *, stop_within_s: float = 20.0, **options: Any) -> AsyncIterator[AsyncProducer]:
    """Lend a producer of this world that knows the topic."""
    producer = AsyncProducer(world.settings(), name="test", options=ProducerOptions(**options))
    await producer.start()
    try:
        await producer.send_many("orders", [])
        yield producer
    finally:
        await producer.stop(stop_within_s)


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine; it must not hang."""
    asyncio.run(asyncio.wait_for(test, 60))


async def until(condition: Any, what: str) -> None:
    """Wait for a condition, with the loop going on."""
    await asyncio.to_thread(wait_until, condition, what=what)


def sending(producer: AsyncProducer, *bodies: int, key: str = "k", **options: Any) -> list[asyncio.Task[Receipt]]:
    """Begin a call for each body, in this order."""
    return [asyncio.ensure_future(producer.send("orders", key=key, body=b"%d" % body, **options)) for body in bodies]


# Order


def test_calls_are_stored_in_their_order_per_key_and_receipts_say_where(world: World) -> None:
    async def publish() -> None:
        async with mqlayer.AsyncProducer(world.settings(), name="test") as producer:
            calls = [producer.send("orders", key=f"k{n % 7}", body=b"%d" % n, tags=["a"]) for n in range(1_000)]
            receipts = await asyncio.gather(*calls)
            places = {(record.partition, record.offset): record.value for record in world.records()}
            assert [places[r.partition, r.offset or 0] for r in receipts] == [str(n) for n in range(1_000)]
            assert producer.stats.stored == 1_000

    run(publish())
    assert world.by_key() == {f"k{k}": [str(n) for n in range(1_000) if n % 7 == k] for k in range(7)}


def test_calls_that_wait_for_the_route_of_a_new_topic_keep_their_order(world: World) -> None:
    """The first call reads the topic in a thread; calls that begin meanwhile wait behind it, and each other."""

    async def publish() -> None:
        async with mqlayer.AsyncProducer(world.settings(), name="test") as producer:
            first = sending(producer, *range(50))
            batch = asyncio.ensure_future(producer.send_many("orders", [Message("k", b"%d" % n) for n in (50, 51)]))
            while not first[0].done():
                await asyncio.sleep(0)
                first += sending(producer, 52 + len(first) - 50)
            await asyncio.gather(*first, batch)

    run(publish())
    found = world.by_key()["k"]
    assert found == [str(n) for n in range(len(found))]


def test_all_ways_and_tasks_keep_the_order_of_their_calls(world: World) -> None:
    async def work(producer: AsyncProducer, task: int) -> None:
        for number in range(0, 100, 5):
            await producer.send("orders", key=f"k{task}", body=b"%d" % number)
            await asyncio.gather(
                producer.send("orders", key=f"k{task}", body=b"%d" % (number + 1)),
                producer.send_many("orders", [Message(f"k{task}", b"%d" % (number + n)) for n in (2, 3)]),
                producer.send("orders", key=f"k{task}", body=b"%d" % (number + 4)),
            )

    async def publish() -> None:
        async with started(world) as producer:
            await asyncio.gather(*(work(producer, task) for task in range(8)))

    run(publish())
    assert world.by_key() == {f"k{task}": [str(n) for n in range(100)] for task in range(8)}


# Batches


def test_a_batch_beyond_the_bounds_goes_part_by_part(world: World) -> None:
    async def publish() -> None:
        messages = [Message(f"k{n % 37}", b"%d" % n) for n in range(3_000)]
        async with started(world, max_pending_messages=600) as producer:
            receipts = await producer.send_many("orders", messages)
        places = {(record.partition, record.offset): record.value.encode() for record in world.records()}
        assert [places[r.partition, r.offset or 0] for r in receipts] == [message.body for message in messages]

    run(publish())
    assert world.by_key() == {f"k{k}": [str(n) for n in range(3_000) if n % 37 == k] for k in range(37)}


def test_ids_name_messages_in_singles_and_batches(world: World) -> None:
    async def publish() -> None:
        async with started(world) as producer:
            first = await producer.send("orders", key="k", body=b"1", dedup_id="a")
            again, other = await producer.send_many(
                "orders", [Message("k", b"x", dedup_id="a"), Message("k", b"2", dedup_id="b")]
            )
            assert (again.duplicate, again.offset, other.duplicate) == (True, first.offset, False)

    run(publish())
    assert world.by_key() == {"k": ["1", "2"]}


def test_of_a_batch_that_is_late_each_outcome_is_told(world: World, node: RedisServer) -> None:
    async def publish() -> None:
        async with started(world) as producer:
            node.send(signal.SIGSTOP)
            with pytest.raises(PartlyPublished) as raised:
                await producer.send_many("orders", [Message("k", b"1"), Message("k", b"2")], timeout_s=0.2)
            assert [type(outcome) for outcome in raised.value.outcomes] == [PublishUnknown] * 2
            node.send(signal.SIGCONT)
            assert await producer.flush(20) == 0

    run(publish())
    assert world.by_key() == {"k": ["1", "2"]}


# Back-pressure


def test_without_room_calls_wait_in_order_and_the_loop_goes_on(world: World, node: RedisServer) -> None:
    async def publish() -> None:
        async with started(world, max_pending_messages=5) as producer:
            node.send(signal.SIGSTOP)
            calls = sending(producer, *range(20))
            batch = asyncio.ensure_future(producer.send_many("orders", [Message("k", b"20"), Message("k", b"21")]))
            await until(lambda: producer.stats.pending == 5, "the bound to be reached")
            assert not any(call.done() for call in calls)
            with pytest.raises(ProducerFull, match="5 messages"):
                await producer.send("orders", key="k", body=b"no room", timeout_s=0.1)
            assert await producer.flush(0.1) == 5
            node.send(signal.SIGCONT)
            assert [receipt.identity.seq for receipt in await asyncio.gather(*calls)] == list(range(1, 21))
            await batch

    run(publish())
    assert world.by_key() == {"k": [str(n) for n in range(22)]}


def test_flush_waits_also_for_calls_without_room(world: World) -> None:
    async def publish() -> None:
        async with started(world, max_pending_messages=2) as producer:
            calls = sending(producer, *range(30))
            await asyncio.sleep(0)
            assert await producer.flush(20) == 0
            assert len(world.by_key()["k"]) == 30
            await asyncio.gather(*calls)

    run(publish())


def pauses(topic: TopicQueues, for_s: float) -> bool:
    """Whether messages of a topic wait after a refusal, and are not sent again for a while."""
    queues = [queue for queue in topic.queues if queue is not None and queue.waiting]
    until_then = time.monotonic() + for_s
    return bool(queues) and all(queue.partition_queue.is_paused(until_then) for queue in queues)


def test_a_full_partition_is_an_error_or_a_wait(world: World) -> None:
    world.add_topic("narrow", partitions=1, backlog_limit=1)

    async def publish() -> None:
        async with started(world, on_backlog="error") as producer:
            await producer.send("narrow", key="k", body=b"1")
            with pytest.raises(BacklogFull):
                await producer.send("narrow", key="k", body=b"2")
            waiting = asyncio.ensure_future(producer.send("narrow", key="k", body=b"3", on_backlog="wait"))
            # A message under way could not be withdrawn.
            topic = producer._engine._topics["narrow"]
            await until(lambda: pauses(topic, 0.5), "the partition to pause")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            with pytest.raises(BacklogFull):
                await producer.send("narrow", key="k", body=b"4", on_backlog="wait", timeout_s=0.2)
            assert producer.stats.withdrawn == 1

    run(publish())
    assert world.by_key("narrow") == {"k": ["1"]}


# Cancellation


def test_a_cancelled_call_withdraws_what_was_not_sent_and_only_that(world: World, node: RedisServer) -> None:
    """One message is under way, one queued behind it, one waits for room: only the first is stored."""

    async def publish() -> None:
        async with started(world, max_in_flight=1, max_pending_messages=3) as producer:
            await producer.send("orders", key="k", body=b"0")
            node.send(signal.SIGSTOP)
            under_way = sending(producer, 1)
            sender = next(iter(producer._engine._metadata.senders.values()))
            await until(lambda: sender.unanswered_count == 1, "the message under way")
            queued, kept, without_room = sending(producer, 2, 3, 4)
            await until(lambda: producer.stats.pending == 3, "the bound to be reached")
            for call in (*under_way, queued, without_room):
                call.cancel()
            ended = await asyncio.gather(*under_way, queued, without_room, return_exceptions=True)
            assert [type(error) for error in ended] == [asyncio.CancelledError] * 3
            assert producer.stats.withdrawn == 1
            node.send(signal.SIGCONT)
            assert (await kept).identity.seq == 3
            assert (await producer.send("orders", key="k", body=b"5")).identity.seq == 4

    run(publish())
    assert world.by_key() == {"k": ["0", "1", "3", "5"]}


def test_a_cancelled_batch_withdraws_what_was_not_sent(world: World, node: RedisServer) -> None:
    """Of its parts one is under way, one queued, and the others wait for room."""

    async def publish() -> None:
        async with started(world, max_in_flight=1, max_pending_messages=1_000) as producer:
            node.send(signal.SIGSTOP)
            batch = asyncio.ensure_future(producer.send_many("orders", [Message("k", b"%d" % n) for n in range(2_000)]))
            sender = next(iter(producer._engine._metadata.senders.values()))
            await until(lambda: sender.unanswered_count == 1 and producer.stats.pending == 1_000, "two parts")
            batch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await batch
            assert (producer.stats.pending, producer.stats.withdrawn) == (500, 500)
            node.send(signal.SIGCONT)
            assert (await producer.send("orders", key="k", body=b"next")).identity.seq == 501

    run(publish())
    assert world.by_key() == {"k": [*(str(n) for n in range(500)), "next"]}


def test_a_timeout_of_the_caller_is_a_cancellation(world: World, node: RedisServer) -> None:
    async def publish() -> None:
        async with started(world) as producer:
            node.send(signal.SIGSTOP)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(producer.send("orders", key="k", body=b"1"), 0.2)
            node.send(signal.SIGCONT)
            await producer.send("orders", key="k", body=b"2")

    run(publish())
    assert world.by_key()["k"][-1] == "2"


def test_a_cancelled_start_leaves_nothing_open(world: World, tmp_path: Path) -> None:
    going_on = tmp_path / "go-on"
    arm("producer.after_source_open", f"wait:{going_on}")

    async def publish() -> None:
        starting = asyncio.ensure_future(AsyncProducer(world.settings(), name="test").start())
        await until(lambda: world.rows("SELECT 1 FROM mqlayer.source WHERE kind = 'direct'"), "the source")
        starting.cancel()
        await asyncio.sleep(0)
        going_on.touch()
        with pytest.raises(asyncio.CancelledError):
            await starting

    run(publish())
    assert not world.rows("SELECT 1 FROM mqlayer.source WHERE kind = 'direct' AND closed_at IS NULL")


# Stopping


def test_stopping_sends_what_is_pending_and_refuses_what_comes_later(world: World) -> None:
    async def publish() -> None:
        producer = AsyncProducer(world.settings(), name="test")
        with pytest.raises(ProducerClosed, match="not started"):
            await producer.send("orders", key="k", body=b"x")
        await producer.stop()
        await producer.start()
        with pytest.raises(InvalidInput, match="started already"):
            await producer.start()
        await producer.send("orders", key="k", body=b"0")
        calls = sending(producer, *range(1, 50))
        await asyncio.sleep(0)
        await producer.stop()
        await asyncio.gather(*calls)
        for refused in (producer.send("orders", key="k", body=b"x"), producer.send_many("orders", [])):
            with pytest.raises(ProducerClosed, match="closed"):
                await refused
        await producer.stop()

    run(publish())
    assert world.by_key() == {"k": [str(n) for n in range(50)]}
    assert not world.rows("SELECT 1 FROM mqlayer.source WHERE kind = 'direct' AND closed_at IS NULL")


def test_stopping_with_messages_unsettled_fails_them(world: World, node: RedisServer) -> None:
    async def publish() -> None:
        async with started(world, max_pending_messages=2) as producer:
            node.send(signal.SIGSTOP)
            pending, behind, without_room = sending(producer, 1, 2, 3)
            await until(lambda: producer.stats.pending == 2, "the bound to be reached")
            stopping = asyncio.ensure_future(producer.stop(0.1))
            with pytest.raises(ProducerClosed, match="it is closed"):
                await without_room
            with pytest.raises(ProducerClosed, match="may or may not be stored"):
                await pending
            node.send(signal.SIGCONT)
            await stopping
            with pytest.raises(ProducerClosed):
                await behind

    run(publish())


def test_an_error_of_the_block_stops_the_producer(world: World) -> None:
    async def publish(calls: list[asyncio.Task[Receipt]]) -> None:
        async with AsyncProducer(world.settings(), name="test") as producer:
            calls += sending(producer, 1)
            await until(lambda: producer.stats.pending or producer.stats.stored, "the message")
            raise LookupError

    async def fail() -> None:
        calls: list[asyncio.Task[Receipt]] = []
        with pytest.raises(LookupError):
            await publish(calls)
        await asyncio.gather(*calls)

    run(fail())
    assert world.by_key() == {"k": ["1"]}
    assert not world.rows("SELECT 1 FROM mqlayer.source WHERE kind = 'direct' AND closed_at IS NULL")


# Stores that fail


def test_a_node_that_restarts_gets_each_message_once_in_order(world: World, node: RedisServer) -> None:
    async def publish() -> None:
        async with started(world) as producer:
            calls = sending(producer, *range(200))
            await calls[20]
            await asyncio.to_thread(node.kill)
            calls += sending(producer, *range(200, 400))
            await asyncio.to_thread(node.start)
            await asyncio.to_thread(world.arm_node)
            await asyncio.gather(*calls)

    run(publish())
    assert world.by_key() == {"k": [str(n) for n in range(400)]}


def test_an_outcome_that_is_late_is_told_by_the_future_of_the_error(
    database_dsn: str, redis_url: str, key_prefix: str
) -> None:
    parts: Any = redis.ConnectionPool.from_url(redis_url).connection_kwargs
    with TcpProxy(parts["host"], parts["port"]) as proxy:
        world = World(database_dsn, key_prefix, [f"redis://{proxy.host}:{proxy.port}/0"], [redis_url])
        world.add_topic(partitions=1)

        async def publish() -> None:
            async with started(world) as producer:
                await producer.send("orders", key="k", body=b"1")
                proxy.blackhole("client_to_server")
                with pytest.raises(PublishUnknown, match="do not publish it again") as raised:
                    await producer.send("orders", key="k", body=b"2", timeout_s=0.2)
                behind = sending(producer, 3)
                proxy.heal()
                late = raised.value.future
                assert late is not None
                assert (await asyncio.wrap_future(late)).offset == 2
                assert (await behind[0]).offset == 3

        run(publish())
        assert world.by_key() == {"k": ["1", "2", "3"]}


def test_a_loss_is_raised_by_the_next_call(world: World) -> None:
    async def publish() -> None:
        async with started(world) as producer:
            await producer.send("orders", key="k", body=b"lost")
            with world.client() as client:
                client.flushall()
            await asyncio.to_thread(world.arm_node)
            with pytest.raises(AcknowledgedLoss):
                await producer.send("orders", key="k", body=b"refused")
            await producer.send("orders", key="k", body=b"1")

    run(publish())
    assert world.by_key() == {"k": ["1"]}


def test_without_stores_a_start_says_so(world: World) -> None:
    async def publish() -> None:
        settings = world.settings().model_copy(update={"dsn": type(world.settings().dsn)("postgresql://127.0.0.1:1/x")})
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1/x"):
            await AsyncProducer(settings).start()
        with pytest.raises(InvalidInput, match="max_in_flight"):
            await AsyncProducer(world.settings(), options=ProducerOptions(max_in_flight=0)).start()

    run(publish())


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"topic": "nobody-made-it"}, NotFound),
        ({"key": 7}, InvalidInput),
        ({"body": b"x" * 262_145}, BodyTooLarge),
        ({"body": object()}, InvalidInput),
        ({"on_backlog": "never"}, InvalidInput),
    ],
)
def test_what_can_never_work_is_refused_at_the_edge(
    world: World, wrong: dict[str, Any], error: type[MqlayerError]
) -> None:
    message: dict[str, Any] = {"topic": "orders", "key": "k", "body": b"x"} | wrong
    topic = message.pop("topic")

    async def publish() -> None:
        async with started(world) as producer:
            with pytest.raises(error):
                await producer.send(topic, **message)
            assert (await producer.send("orders", key="k", body=b"good")).identity.seq == 1

    run(publish())
    assert world.by_key() == {"k": ["good"]}


# Loops


def test_a_producer_belongs_to_the_loop_that_started_it(world: World) -> None:
    producer = AsyncProducer(world.settings(), name="test")
    refused: list[BaseException] = []

    async def elsewhere() -> None:
        for call in (producer.send("orders", key="k", body=b"x"), producer.flush(), producer.stop()):
            try:
                await call
            except InvalidInput as error:
                refused.append(error)

    async def publish() -> None:
        async with producer:
            await asyncio.to_thread(asyncio.run, elsewhere())
            await producer.send("orders", key="k", body=b"1")

    run(publish())
    assert len(refused) == 3
    assert world.by_key() == {"k": ["1"]}


def test_loops_have_producers_of_their_own(world: World) -> None:
    async def publish(loop: int) -> None:
        async with started(world) as producer:
            await asyncio.gather(*sending(producer, *range(300), key=f"k{loop}"))

    threads = [threading.Thread(target=run, args=(publish(loop),)) for loop in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert world.by_key() == {f"k{loop}": [str(n) for n in range(300)] for loop in range(2)}
