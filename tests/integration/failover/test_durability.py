"""What a confirmed message survives, by its topic's durability class: nodes are killed between append and wait."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mqlayer.errors import AcknowledgedLoss, ConfigurationRefused, PublishUnknown, StoreUnavailable
from mqlayer.outbox import rotate
from mqlayer.producing import AsyncProducer, Message, Producer, Receipt
from mqlayer.topics import set_durability, set_node_replicas
from tests.fixtures.power import PoweredRedis
from tests.fixtures.replicas import Pair, pair_of, sentinel_of
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.world import World

TOPICS = ("plain", "safe")


@pytest.fixture
def pair(start_redis: StartRedis) -> Iterator[Pair]:
    """A primary and its replica."""
    with pair_of(start_redis) as pair:
        yield pair


@pytest.fixture
def world(pair: Pair, tmp_path: Path, database_dsn: str, key_prefix: str) -> Iterator[World]:
    """A node behind a Sentinel, with a topic that waits for the node alone, and one that waits for its replica."""
    with sentinel_of(pair.primary, tmp_path / "sentinel") as port:
        world = World(database_dsn, key_prefix, [f"sentinel://127.0.0.1:{port}/orders/0"])
        assert set_node_replicas(world.runtime(), "node-1", 1)
        world.add_topic("plain", partitions=1)
        world.add_topic("safe", partitions=1)
        assert set_durability(world.runtime(), "safe", "replica")
        world.urls = [pair.primary.url]
        yield world


def bodies(world: World, topic: str) -> list[str]:
    """Return what a topic's partitions hold."""
    return [record.value for record in world.records() if record.topic == topic]


def armed(world: World) -> bool:
    """Arm the node, once its Sentinel names a primary."""
    try:
        world.arm_node()
    except StoreUnavailable:
        return False
    return True


def unknown(producer: Any, body: bytes) -> Future[Receipt]:
    """Send to the topic that waits; it can't be confirmed."""
    with pytest.raises(PublishUnknown, match="0 of 1 replicas have it") as caught:
        producer.send("safe", key="k", body=body, timeout_s=4)
    future = caught.value.future
    assert future is not None
    return future


def test_a_confirmed_message_survives_a_lost_primary_by_its_class(
    world: World, pair: Pair, start_redis: StartRedis
) -> None:
    """The replica lags when the primary goes with its disk: what was confirmed without it is lost, the rest is not."""
    with world.producer() as producer:
        for topic in TOPICS:
            producer.send_many(topic, [Message("k", b"first-%d" % n) for n in range(3)])
        pair.wait_in_step()
        pair.cut_connection()
        confirmed = producer.send("plain", key="k", body=b"second")
        future = unknown(producer, b"second")
        assert confirmed.offset is not None
        assert producer.stats.stored == 7
        pair.primary.erase()
        pair.wait_promoted()
        world.urls = [pair.replica.url]
        wait_until(lambda: armed(world), timeout_s=30, what="the promoted one armed")
        with pytest.raises(AcknowledgedLoss) as caught:
            wait_until(lambda: producer.send("plain", key="k", body=b"third", timeout_s=30), what="the loss told")
        assert [(loss.topic, loss.first, loss.last) for loss in caught.value.losses] == [("plain", 4, 4)]
        # The promoted one has no replica yet, so nothing is confirmed there.
        assert not future.done()
        start_redis(options={"replicaof": f"127.0.0.1 {pair.replica.port}"})
        assert future.result(30).identity.seq == 4
        producer.send("safe", key="k", body=b"third", timeout_s=30)
    assert bodies(world, "safe") == ["first-0", "first-1", "first-2", "second", "third"]
    assert "second" not in bodies(world, "plain")


def test_a_repetition_waits_too_and_is_stored_once(world: World, pair: Pair) -> None:
    """A new connection that finds the message there wrote nothing: its wait counts by the touch alone."""
    with world.producer() as producer:
        producer.send("safe", key="k", body=b"first")
        pair.cut_connection()
        future = unknown(producer, b"second")
        wait_until(lambda: producer.stats.connections_lost >= 3, timeout_s=20, what="two repetitions")
        assert not future.done()
        # What waits for less goes on meanwhile.
        assert producer.send("plain", key="k", body=b"plain").offset is not None
        assert not future.done()
        pair.heal_connection()
        assert future.result(20).identity.seq == 2
        assert producer.send("safe", key="other", body=b"once", dedup_id="a").replicas == 1
    assert asyncio.run(published(world)).replicas == 1
    assert bodies(world, "safe")[:2] == ["first", "second"]


async def published(world: World) -> Receipt:
    """Publish from a loop."""
    async with AsyncProducer(world.settings(), name="async") as producer:
        return await producer.send("safe", key="async", body=b"async")


def recorded(world: World) -> int:
    """Return how many messages count as relayed."""
    return int(world.rows("SELECT coalesce(sum(seq), 0) FROM mqlayer_app.relayed")[0][0])


def empty_old_slots(world: World) -> None:
    """Let all rows be half an hour old, and empty their slot if all of them count as relayed."""
    (slot,) = world.rows("SELECT (floor(date_part('epoch', clock_timestamp()) / 900)::bigint + 2) & 3")[0]
    world.rows("UPDATE mqlayer_app.outbox SET slot = %s", slot)
    rotate(world.database)


@pytest.mark.parametrize("topic", TOPICS)
def test_rows_stay_in_the_outbox_until_the_class_is_held(world: World, pair: Pair, topic: str) -> None:
    """A replica that lags for long is promoted: what it lacks is in the outbox, or in no place any more."""
    with world.relay():
        world.publish(10, topic=topic, tag="first")
        wait_until(lambda: recorded(world) == 10, what="the first ones recorded")
        pair.wait_in_step()
        pair.cut_connection()
        world.publish(10, topic=topic, tag="second")
        wait_until(lambda: len(bodies(world, topic)) == 20, what="all on the primary")
        if topic == "plain":
            wait_until(lambda: recorded(world) == 20, what="those without the replica recorded")
        else:
            world.publish(1, topic="plain")
            wait_until(lambda: recorded(world) == 11, what="another topic's recorded meanwhile")
        empty_old_slots(world)
        pair.primary.erase()
        pair.wait_promoted()
        world.urls = [pair.replica.url]
        if topic == "safe":
            wait_until(lambda: len(bodies(world, topic)) == 20, timeout_s=40, what="all on the promoted one")
            return
        gone = "SELECT count(*) FROM mqlayer_app.quarantined WHERE reason LIKE 'gone from the outbox%%'"
        wait_until(lambda: world.rows(gone)[0][0], timeout_s=40, what="the loss told")
        assert len(bodies(world, topic)) == 10


@pytest.mark.full
def test_under_load_no_confirmed_message_of_the_class_is_lost(
    world: World, pair: Pair, start_redis: StartRedis
) -> None:
    """The replica, and then the primary, are lost while both topics are published to."""
    with world.producer() as producer, ThreadPoolExecutor(2) as pool:
        stop = threading.Event()
        confirmed = [pool.submit(publish_until, stop, producer, topic) for topic in TOPICS]
        wait_until(lambda: len(bodies(world, "safe")) > 5, timeout_s=20, what="some of both")
        pair.cut_connection()
        at = len(bodies(world, "plain"))
        wait_until(lambda: len(bodies(world, "plain")) > at + 20, timeout_s=20, what="some without the replica")
        pair.primary.erase()
        stop.set()
        plain, safe = (one.result(60) for one in confirmed)
        pair.wait_promoted()
        world.urls = [pair.replica.url]
        wait_until(lambda: armed(world), timeout_s=30, what="the promoted one armed")
        start_redis(options={"replicaof": f"127.0.0.1 {pair.replica.port}"})
        with contextlib.suppress(AcknowledgedLoss):
            producer.flush(30)
    assert safe
    assert safe <= set(bodies(world, "safe"))
    assert plain - set(bodies(world, "plain"))


def publish_until(stop: threading.Event, producer: Producer, topic: str) -> set[str]:
    """Publish one after the other; return what was confirmed."""
    found = set[str]()
    for number in itertools.count():
        if stop.is_set():
            break
        with contextlib.suppress(PublishUnknown, AcknowledgedLoss):
            producer.send(topic, key="k", body=b"%d" % number, timeout_s=2)
            found.add(str(number))
    return found


def test_what_is_synced_survives_a_power_cut(
    server_directory: Path, sync_noter: Path, database_dsn: str, key_prefix: str
) -> None:
    """With `everysec`, a kill loses nothing, and a power cut what was confirmed without a sync."""
    server = PoweredRedis(server_directory / "power", options={"appendfsync": "everysec"})
    server.library = sync_noter
    server.start()
    try:
        world = World(database_dsn, key_prefix, [server.url])
        world.add_topic("plain", partitions=1)
        world.add_topic("safe", partitions=1)
        try:
            set_durability(world.runtime(), "safe", "disk")
        except ConfigurationRefused as refusal:
            pytest.skip(f"scripts/matrix runs this on others: {refusal.value}, {refusal.wanted}")
        sent = {topic: list[str]() for topic in TOPICS}
        with world.producer() as producer:
            publish_round(producer, sent, "killed")
            server.kill()
            server.start()
            world.arm_node()
            assert {topic: bodies(world, topic) for topic in TOPICS} == sent
            for number in range(10):
                publish_round(producer, sent, f"round-{number}")
                server.cut_power()
                server.start()
                world.arm_node()
                assert bodies(world, "safe") == sent["safe"]
                if bodies(world, "plain") != sent["plain"]:
                    break
            else:
                pytest.fail("everything was synced each time: nothing is proven")
            with contextlib.suppress(AcknowledgedLoss):
                producer.flush(20)
    finally:
        server.erase()


def publish_round(producer: Producer, sent: dict[str, list[str]], tag: str) -> None:
    """Confirm a message of each topic, the one that is synced first: the next sync is a second off."""
    for topic in reversed(TOPICS):
        wait_until(lambda: confirms(producer, topic, tag), timeout_s=30, what=f"{tag} of {topic} confirmed")  # noqa: B023
        sent[topic].append(tag)


def confirms(producer: Producer, topic: str, tag: str) -> bool:
    """Send a message; a loss is told once."""
    with contextlib.suppress(AcknowledgedLoss):
        producer.send(topic, key="k", body=tag.encode(), timeout_s=30)
        return True
    return False
