"""A node with three replicas: what the classes confirm survives replicas and primary that die one after the other."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from mqlayer.errors import AcknowledgedLoss, MqlayerError, PublishUnknown
from mqlayer.producing import Producer, Receipt
from mqlayer.routes import rearm_lost_nodes
from mqlayer.topics import set_durability, set_node_replicas
from tests.fixtures.replicas import Replicas, replicas_of
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.world import World

pytestmark = [pytest.mark.full, pytest.mark.slow]

REPLICAS = 3
KEYS = 3
PATIENCE_S = 60.0


@pytest.fixture
def servers(start_redis: StartRedis, tmp_path: Path) -> Iterator[Replicas]:
    """A primary, three replicas and a Sentinel."""
    with replicas_of(start_redis, tmp_path / "sentinel", REPLICAS) as servers:
        yield servers


@pytest.fixture
def world(servers: Replicas, database_dsn: str, key_prefix: str) -> World:
    """A node of these, with a topic for each of two classes."""
    world = World(database_dsn, key_prefix, [servers.url])
    assert set_node_replicas(world.runtime(), "node-1", REPLICAS)
    for durability in ("replica", "quorum"):
        world.add_topic(durability, partitions=1)
        assert set_durability(world.runtime(), durability, durability)
    world.urls = [servers.primary.url]
    return world


class Load:
    """Publishes to the topic of class `quorum`, one message after the other."""

    def __init__(self, producer: Producer) -> None:
        self._producer, self._ending = producer, threading.Event()
        self.confirmed: list[str] = []
        self.unknown: list[Future[Receipt]] = []
        self.bodies: list[str] = []

    def _run(self) -> None:
        for number in itertools.count():
            if self._ending.is_set():
                return
            body = f"{number}"
            try:
                self.bodies.append(body)
                self._producer.send("quorum", key=f"key-{number % KEYS}", body=body.encode(), timeout_s=1)
                self.confirmed.append(body)
            except PublishUnknown as unknown:
                if unknown.future is not None:
                    self.unknown.append(unknown.future)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Publish until the end of the block."""
        thread = threading.Thread(target=self._run, name="load")
        thread.start()
        try:
            yield
        finally:
            self._ending.set()
            thread.join(PATIENCE_S)
        assert not thread.is_alive()

    def wait_confirmed(self, more: int) -> None:
        """Wait until so many more are confirmed."""
        there = len(self.confirmed)
        wait_until(lambda: len(self.confirmed) >= there + more, timeout_s=PATIENCE_S, what="more to be confirmed")


@contextmanager
def arming(world: World) -> Iterator[None]:
    """Arm the promoted server, as a worker does. On a busy machine the Sentinel may promote another one later."""
    ending = threading.Event()

    def arm() -> None:
        while not ending.wait(0.1):
            with contextlib.suppress(MqlayerError):
                rearm_lost_nodes(world.runtime())

    thread = threading.Thread(target=arm, name="arms")
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(PATIENCE_S)


def bodies(world: World, servers: Replicas, topic: str) -> list[str]:
    """Return what the present primary holds of a topic, in order."""
    world.urls = [servers.wait_promoted().url]
    return [record.value for record in world.records(topic)]


@pytest.mark.parametrize("first", ["lags", "dies"])
def test_a_quorum_survives_replicas_and_then_the_primary(world: World, servers: Replicas, first: str) -> None:
    """Of three replicas the best one is promoted; nothing confirmed is lost, and all goes on with the others back."""
    with world.producer() as producer, arming(world):
        load = Load(producer)
        with load.under_way():
            load.wait_confirmed(20)
            if first == "lags":
                servers.cut_off(0)
            else:
                servers.replicas[0].kill()
            load.wait_confirmed(10)
            servers.replicas[2].kill()
            wait_until(lambda: load.unknown, timeout_s=PATIENCE_S, what="one of two not to be enough")
            at = len(load.confirmed)
            servers.primary.erase()
            assert servers.wait_promoted() is servers.replicas[1], "the one that had all"
            assert set(load.confirmed) <= set(bodies(world, servers, "quorum"))
            if first == "lags":
                servers.follow_again(0)
            else:
                servers.replicas[0].start()
            servers.replicas[2].start()
            load.wait_confirmed(20)
        for future in load.unknown:
            future.result(PATIENCE_S)
    assert len(load.confirmed) > at
    for key in range(KEYS):
        sent = [one for one in load.bodies if int(one) % KEYS == key]
        assert [one for one in bodies(world, servers, "quorum") if int(one) % KEYS == key] == sent, (
            "each once, in order"
        )


@pytest.mark.parametrize("durability", ["replica", "quorum"])
def test_the_only_replica_that_confirmed_dies_with_the_primary(
    world: World, servers: Replicas, durability: str
) -> None:
    """Of `replica`, a message is lost, and told; of `quorum`, it was not confirmed, and comes again."""
    with world.producer() as producer, arming(world):
        producer.send(durability, key="k", body=b"first", timeout_s=PATIENCE_S)
        servers.wait_in_step()
        for number in (0, 1):
            servers.cut_off(number)
        if durability == "replica":
            producer.send(durability, key="k", body=b"second", timeout_s=PATIENCE_S)
        else:
            with pytest.raises(PublishUnknown, match="1 of 2 replicas have it"):
                producer.send(durability, key="k", body=b"second", timeout_s=4)
        servers.replicas[2].kill()
        servers.primary.erase()
        servers.wait_promoted()
        for number in (0, 1):
            servers.follow_again(number)
        if durability == "replica":
            with pytest.raises(AcknowledgedLoss) as caught:
                wait_until(lambda: producer.send("replica", key="k", body=b"third", timeout_s=PATIENCE_S), what="it")
            assert [(loss.first, loss.last) for loss in caught.value.losses] == [(2, 2)]
        servers.replicas[2].start()
        producer.send(durability, key="k", body=b"fourth", timeout_s=PATIENCE_S)
    kept = [] if durability == "replica" else ["second"]
    assert [one for one in bodies(world, servers, durability) if one != "third"] == ["first", *kept, "fourth"]
