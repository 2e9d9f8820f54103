"""AsyncReceiver: several tasks, cancellation, closing, event loops; `test_receiver.py` has the rules of ordered pop."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, Final

import psycopg
import pytest

from mqlayer import AsyncReceiver, PopMessage, Receiver
from mqlayer.errors import AlreadyApplied, Conflict, InvalidInput, NodeNotArmed, OutOfOrder, StaleToken
from tests.fixtures import popped
from tests.fixtures.consumers import Stage, StartStage
from tests.fixtures.failpoints import broken_off_at
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.threads import threads_left
from tests.fixtures.wait import awake_s, wait_until

pytestmark = pytest.mark.usefixtures("as_consumer")

WAIT_S: Final = 5.0
HANGS_S: Final = 8.0
KEYS: Final = 10
EACH: Final = 20

Seen = dict[str | None, list[bytes]]


@pytest.fixture
def one(start_stage: StartStage, redis_url: str) -> Stage:
    """A topic of one partition."""
    return start_stage(redis_url, partitions=1)


def receiver_of(stage: Stage, **options: Any) -> AsyncReceiver:
    return AsyncReceiver(stage.topic, group="g", settings=stage.settings(), **options)


def bodies(messages: list[PopMessage]) -> list[bytes]:
    return [message.body for message in messages]


def expected() -> Seen:
    """Return what a stage's `send_numbers(KEYS, EACH)` sent, by key."""
    return {f"key-{key}": [b"%d" % number for number in range(1, EACH + 1)] for key in range(KEYS)}


def out_count(stage: Stage) -> int:
    """Return how many messages are out."""
    (partition,) = stage.partitions
    return popped.out_count(stage.redis, stage.prefix, partition, stage.group_id())


async def until(condition: Callable[[], object], *, what: str) -> None:
    """Wait in the loop, which goes on."""
    await asyncio.to_thread(wait_until, condition, what=what)


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# -- tasks -----------------------------------------------------------------------------------------------------------


async def take_all(receiver: AsyncReceiver, seen: Seen, left: list[int]) -> None:
    """Receive and acknowledge until nothing is left; a key's next message comes only after that."""
    while left[0] > 0:
        batch = await receiver.receive(3, wait_s=0.2)
        for message in batch:
            seen[message.key].append(message.body)
            left[0] -= 1
        await receiver.ack(batch)


def test_several_tasks_keep_each_key_in_order(start_stage: StartStage, redis_url: str) -> None:
    """Case 50, within one process: a key's messages are with one task at a time."""
    stage = start_stage(redis_url, partitions=3)
    stage.send_numbers(KEYS, EACH)
    seen: Seen = defaultdict(list)

    async def run() -> None:
        left = [KEYS * EACH]
        async with receiver_of(stage) as receiver, asyncio.TaskGroup() as tasks:
            for _ in range(8):
                tasks.create_task(take_all(receiver, seen, left))

    asyncio.run(run())
    assert seen == expected()
    assert stage.all_settled()


def test_two_event_loops_may_use_one_receiver(start_stage: StartStage, redis_url: str) -> None:
    stage = start_stage(redis_url, partitions=2)
    stage.send_numbers(KEYS, EACH)
    seen: Seen = defaultdict(list)
    left = [KEYS * EACH]

    async def run() -> None:
        async with receiver_of(stage) as receiver:
            other = threading.Thread(target=lambda: asyncio.run(take_all(receiver, seen, left)))
            other.start()
            await take_all(receiver, seen, left)
            await asyncio.to_thread(other.join)

    asyncio.run(run())
    assert seen == expected()
    assert stage.all_settled()


def test_receivers_of_both_kinds_share_a_group(one: Stage) -> None:
    one.send([("k", b"1"), ("k", b"2"), ("l", b"3")])

    async def run() -> None:
        async with receiver_of(one) as receiver:
            first = await receiver.receive(1, wait_s=WAIT_S)
            with Receiver(one.topic, group="g", settings=one.settings()) as other:
                assert bodies(other.receive(wait_s=WAIT_S)) == [b"3"]
                await receiver.ack(first)
                assert bodies(other.receive(wait_s=WAIT_S)) == [b"2"]

    asyncio.run(run())


def test_waiting_calls_need_no_thread_each_and_end_in_time(one: Stage) -> None:
    """Fifty calls wait at once; a message goes to one of them, the others return empty when their time is over."""

    async def run() -> None:
        async with receiver_of(one) as receiver:
            assert await receiver.receive(wait_s=0) == []
            threads = threading.active_count()
            calls = [asyncio.create_task(receiver.receive(wait_s=4.0)) for _ in range(50)]
            await until(lambda: len(receiver._running().receiving._pending) == 50, what="all wait")
            assert threading.active_count() <= threads + 1  # the one of `until`
            began = awake_s()
            await asyncio.to_thread(one.send, [("k", b"1")])
            done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            assert [bodies(task.result()) for task in done] == [[b"1"]]
            found = await asyncio.gather(*calls)
            assert sum(map(len, found)) == 1
            assert awake_s() - began < 9

    asyncio.run(run())


@pytest.mark.usefixtures("as_who_may_arm")
def test_a_node_that_hangs_does_not_block_the_loop(start_stage: StartStage, start_redis: Any) -> None:
    """Neither a receive nor a settlement."""
    server = start_redis()
    stage = start_stage(server.url, partitions=1)
    stage.send([("k", b"1")])
    gaps: list[float] = []

    async def tick(stopping: asyncio.Event) -> None:
        last = awake_s()
        while not stopping.is_set():
            await asyncio.sleep(0.005)
            gaps.append(awake_s() - last)
            last = awake_s()

    async def run() -> None:
        stopping = asyncio.Event()
        settings = stage.settings(socket_timeout_s=HANGS_S)
        async with AsyncReceiver(stage.topic, group="g", settings=settings) as receiver:
            batch = await receiver.receive(wait_s=WAIT_S)
            ticking = asyncio.create_task(tick(stopping))
            server.send(signal.SIGSTOP)
            try:
                calls = [asyncio.create_task(receiver.receive(wait_s=0.1)), asyncio.create_task(receiver.ack(batch))]
                # By themselves both end by the timeout of their connection.
                await asyncio.wait(calls, timeout=1.0)
                assert not any(call.done() for call in calls)
            finally:
                server.send(signal.SIGCONT)
            await asyncio.gather(*calls, return_exceptions=True)
            stopping.set()
            await ticking

    asyncio.run(run())
    assert max(gaps) < HANGS_S / 2, max(gaps)


# -- cancellation ----------------------------------------------------------------------------------------------------


def test_a_cancelled_call_that_waits_takes_nothing(one: Stage) -> None:
    async def run() -> None:
        async with receiver_of(one) as receiver:
            call = asyncio.create_task(receiver.receive())
            await until(lambda: receiver._running().receiving._pending, what="it waits")
            await ended(call)
            await asyncio.to_thread(one.send, [("k", b"1")])
            again = await receiver.receive(wait_s=WAIT_S)
            assert [(message.body, message.attempt) for message in again] == [(b"1", 1)]

    asyncio.run(run())


@pytest.mark.parametrize("times", [1, 3])
def test_messages_given_out_for_a_cancelled_call_go_to_the_next_one_uncounted(one: Stage, times: int) -> None:
    """Case 57: as the same attempt, also where the next one is cancelled too."""
    one.send([("k", b"1"), ("k", b"2"), ("l", b"3")])

    async def run() -> None:
        async with receiver_of(one) as receiver:
            for _ in range(times):
                call = asyncio.create_task(receiver.receive())
                await asyncio.sleep(0)
                # The loop stands still here, so the answer waits unread.
                wait_until(lambda: not receiver._running().receiving._pending and out_count(one) == 3, what="all out")
                await ended(call)
            again = await receiver.receive(wait_s=WAIT_S)
            assert [(message.body, message.attempt) for message in again] == [(b"1", 1), (b"2", 1), (b"3", 1)]
            await receiver.ack(again)

    asyncio.run(run())
    assert one.all_settled()


def test_a_cancelled_call_of_a_named_attempt_is_made_again_with_its_name(one: Stage) -> None:
    one.send([("k", b"1"), ("k", b"2")])

    async def run() -> None:
        async with receiver_of(one) as receiver:
            call = asyncio.create_task(receiver.receive(attempt_id="try-1"))
            await asyncio.sleep(0)
            wait_until(lambda: out_count(one) == 2, what="both are out")
            await ended(call)
            assert await receiver.receive(wait_s=0.2) == []
            again = await receiver.receive(attempt_id="try-1", wait_s=0)
            assert [(message.body, message.attempt) for message in again] == [(b"1", 1), (b"2", 1)]

    asyncio.run(run())


def test_messages_of_a_cancelled_call_come_again_after_their_visibility_timeout(one: Stage) -> None:
    """To another receiver, once this one is closed."""
    one.send([("k", b"1"), ("k", b"2")])

    async def run() -> None:
        async with receiver_of(one) as receiver:
            call = asyncio.create_task(receiver.receive(1, visibility_timeout_s=0.3))
            await asyncio.sleep(0)
            wait_until(lambda: out_count(one) == 1, what="it is out")
            await ended(call)
        async with receiver_of(one) as receiver:
            again = await receiver.receive(wait_s=WAIT_S)
            assert [(message.body, message.attempt) for message in again] == [(b"1", 2), (b"2", 1)]

    asyncio.run(run())


def test_calls_that_are_cancelled_at_random_lose_and_reverse_nothing(start_stage: StartStage, redis_url: str) -> None:
    """No message waits for its visibility timeout of 30 s, none is counted twice. MQLAYER_CHAOS_SEED repeats a run."""
    stage = start_stage(redis_url, partitions=2)
    stage.send_numbers(KEYS, EACH)
    seed = int(os.environ.get("MQLAYER_CHAOS_SEED", random.randrange(2**32)))
    rng = random.Random(seed)
    seen: Seen = defaultdict(list)
    attempts: set[int] = set()
    cancelled = itertools.count()

    async def take(receiver: AsyncReceiver, left: list[int]) -> None:
        while left[0] > 0:
            try:
                async with asyncio.timeout(rng.random() * 0.004):
                    batch = await receiver.receive(4)
            except TimeoutError:
                next(cancelled)
                continue
            for message in batch:
                seen[message.key].append(message.body)
                attempts.add(message.attempt)
                left[0] -= 1
            await receiver.ack(batch)

    async def run() -> None:
        left = [KEYS * EACH]
        async with receiver_of(stage) as receiver, asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(take(receiver, left))

    asyncio.run(asyncio.wait_for(run(), 60))
    assert seen == expected(), seed
    assert attempts == {1}, seed
    assert next(cancelled) > 10
    assert stage.all_settled()


def test_a_lost_reply_is_asked_for_again_by_the_next_call(one: Stage) -> None:
    """Case 57; the error is the call's own, and the thread goes on."""
    one.send([("k", b"1"), ("k", b"2")])

    async def run() -> None:
        async with receiver_of(one) as receiver:
            with broken_off_at("pop.after_receive"):
                await receiver.receive(wait_s=WAIT_S)
            again = await receiver.receive(wait_s=WAIT_S)
            assert [(message.body, message.attempt) for message in again] == [(b"1", 1), (b"2", 1)]

    asyncio.run(run())


# -- open, closed, iterated ------------------------------------------------------------------------------------------


def test_closing_ends_calls_and_leaves_messages_out(one: Stage) -> None:
    """Messages in hand come again after their visibility timeout; what is not there any more says so."""
    one.send([("k", b"1"), ("k", b"2")])

    async def run() -> None:
        receiver = await receiver_of(one).open()
        (first,) = await receiver.receive(1, visibility_timeout_s=3.0, wait_s=WAIT_S)
        calls = [asyncio.create_task(receiver.receive()) for _ in range(3)]
        await until(lambda: len(receiver._running().receiving._pending) == 3, what="they wait")
        await receiver.close()
        for call in calls:
            with pytest.raises(Conflict, match="not open"):
                await call
        for use in (receiver.receive(), receiver.ack([first]), receiver.nack(first), receiver.extend(first, 1)):
            with pytest.raises(Conflict, match="not open"):
                await use
        await receiver.close()
        async with receiver:
            again = await receiver.receive(wait_s=WAIT_S)
            assert [(message.body, message.attempt) for message in again] == [(b"1", 2), (b"2", 1)]
            with pytest.raises(Conflict, match="is open"):
                await receiver.open()
            with pytest.raises(StaleToken):
                await receiver.ack([first])

    before = threading.enumerate()
    asyncio.run(run())
    assert threads_left(before) == []


def test_opening_that_is_cancelled_leaves_nothing_open(one: Stage) -> None:
    async def run() -> None:
        receiver = receiver_of(one)
        opening = asyncio.create_task(receiver.open())
        await asyncio.sleep(0)
        await ended(opening)
        async with receiver:
            assert receiver.group.name == "g"

    before = threading.enumerate()
    asyncio.run(run())
    assert threads_left(before) == []


def test_iteration_gives_one_message_at_a_time_and_ends_with_the_receiver(one: Stage) -> None:
    one.send([("k", b"1"), ("k", b"2"), ("l", b"3")])
    seen: list[tuple[bytes, int]] = []

    async def iterate(receiver: AsyncReceiver) -> None:
        async for message in receiver:
            if len(seen) == 1:
                seen.append((b"given back", message.attempt))
                await receiver.nack(message)
                continue
            seen.append((message.body, message.attempt))
            await receiver.ack([message])

    async def run() -> None:
        async with receiver_of(one, scope="partition") as receiver:
            task = asyncio.create_task(iterate(receiver))
            await until(one.all_settled, what="all is settled")
        await task

    asyncio.run(run())
    assert seen == [(b"1", 1), (b"given back", 1), (b"2", 2), (b"3", 1)]


def test_bad_arguments_are_refused_before_anything_is_asked(one: Stage) -> None:
    async def run() -> None:
        async with receiver_of(one) as receiver:
            for options in ({"max_messages": 501}, {"visibility_timeout_s": 0}, {"wait_s": -1}, {"attempt_id": "A B"}):
                with pytest.raises(InvalidInput):
                    await receiver.receive(**options)
            assert receiver.fetch_count == 0

    asyncio.run(run())


# -- effects, outages ------------------------------------------------------------------------------------------------


def test_the_fence_and_the_inbox_work_on_async_connections(one: Stage) -> None:
    """Invariant 12: once, in order."""
    one.send([("k", b"1"), ("k", b"2")])

    async def book(receiver: AsyncReceiver, connection: Any, message: PopMessage) -> None:
        async with connection.transaction():
            await receiver.fence(connection, message)
            await connection.execute("INSERT INTO sink VALUES (%s)", [message.body.decode()])

    async def run() -> list[str]:
        async with (
            receiver_of(one) as receiver,
            await psycopg.AsyncConnection.connect(one.dsn, autocommit=True) as connection,
        ):
            await connection.execute("CREATE TABLE sink (body text)")
            first, second = await receiver.receive(wait_s=WAIT_S)
            with pytest.raises(OutOfOrder):
                await book(receiver, connection, second)
            await book(receiver, connection, first)
            with pytest.raises(AlreadyApplied):
                await book(receiver, connection, first)
            await book(receiver, connection, second)
            for record in (receiver.fence, receiver.inbox):
                with pytest.raises(InvalidInput, match="no transaction"):
                    await record(connection, first)
            for refused in (False, True):
                try:
                    async with connection.transaction():
                        await receiver.inbox(connection, first, name="mail")
                except AlreadyApplied:
                    assert refused
            await receiver.ack([first, second])
            rows = await (await connection.execute("SELECT body FROM sink")).fetchall()
            return [str(row[0]) for row in rows]

    assert asyncio.run(run()) == ["1", "2"]
    assert one.all_settled()


def test_a_sync_connection_is_refused(one: Stage) -> None:
    one.send([("k", b"1")])

    async def run() -> None:
        async with receiver_of(one) as receiver:
            (message,) = await receiver.receive(wait_s=WAIT_S)
            with kept_session(one.dsn) as connection:
                for use in (receiver.fence(connection, message), receiver.inbox(connection, message)):
                    with pytest.raises(InvalidInput, match="async connection"):
                        await use

    asyncio.run(run())


@pytest.mark.usefixtures("as_who_may_arm")
def test_a_restarted_node_is_armed_and_gives_everything_again(start_stage: StartStage, start_redis: Any) -> None:
    """Case 42, while calls wait."""
    server = start_redis()
    stage = start_stage(server.url, partitions=1)

    async def run() -> None:
        async with receiver_of(stage, scope="partition") as receiver:
            await asyncio.to_thread(stage.send, [("k", b"1"), ("k", b"2")])
            old = await receiver.receive(1, visibility_timeout_s=3.0, wait_s=WAIT_S)
            call: Coroutine[Any, Any, list[PopMessage]] = receiver.receive(wait_s=15)
            waiting = asyncio.create_task(call)
            await until(lambda: receiver._running().receiving._pending, what="it waits")
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            again = await waiting
            assert [(message.body, message.attempt) for message in again] == [(b"1", 2), (b"2", 1)]
            with pytest.raises((StaleToken, NodeNotArmed)):
                await receiver.ack(old)
            await receiver.ack(again)

    asyncio.run(run())
    assert stage.all_settled()
