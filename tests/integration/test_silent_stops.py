"""Case 36: stopping while all nodes are silent takes as long as it takes with one of them, however many there are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from mqlayer import App, MemberOptions, Producer
from mqlayer.domain.routing import LP_COUNT, lp_of
from mqlayer.settings import Settings
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.proxy import TcpProxy
from tests.proof.world import World

NODES = 4
SILENCE_S = 60.0
"""For how long a process waits for an answer: longer than any of its parts may take to stop."""
STOPPED_WITHIN_S = 15.0
"""Four silent nodes, one after the other, would take a member 20 to 40 s."""

pytestmark = pytest.mark.world(partitions=NODES)


@pytest.fixture
def lines(start_redis: StartRedis) -> Iterator[list[TcpProxy]]:
    """The ways to nodes of the test's own."""
    with ExitStack() as cleanup:
        ends = [urlsplit(start_redis().url) for _ in range(NODES)]
        yield [cleanup.enter_context(TcpProxy(end.hostname or "", end.port or 0)) for end in ends]


@pytest.fixture
def world_urls(lines: list[TcpProxy]) -> list[str]:
    """Each node is reached by its own way."""
    return [f"redis://{line.host}:{line.port}/0" for line in lines]


@pytest.fixture
def settings(world: World) -> Settings:
    """Of a process that takes silence for an answer that is late."""
    return world.settings(socket_timeout_s=SILENCE_S, lease_s=30.0)


def key_of(partition: int) -> str:
    """Return a key of one of the topic's partitions, counted from 0."""
    keys = (f"key-{number}" for number in range(10_000))
    return next(key for key in keys if lp_of(key.encode()) * NODES // LP_COUNT == partition)


def stop_in_silence(lines: list[TcpProxy], stop: Callable[[], object]) -> float:
    """Stop while no node is heard; return how long that took."""
    for line in lines:
        line.blackhole()
    began = time.monotonic()
    stop()
    return time.monotonic() - began


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_a_member_stops(world: World, settings: Settings, lines: list[TcpProxy], mode: str) -> None:
    app, handled = App(settings), list[bytes]()
    options = MemberOptions(drain_timeout_s=0.5)
    register = app.consumer("orders", group="g", mode=mode, options=options)  # type: ignore[call-overload]
    register(handled.append)
    app.start()
    with ExitStack() as cleanup:
        cleanup.callback(app.stop, 0.0)
        with Producer(settings) as producer:
            for node in range(NODES):
                producer.send("orders", key=key_of(node), body=b"1")
        wait_until(lambda: len(handled) == NODES, what="a message of each node is handled")
        assert stop_in_silence(lines, app.stop) < STOPPED_WITHIN_S


def test_a_producer_closes(world: World, settings: Settings, lines: list[TcpProxy]) -> None:
    producer = Producer(settings)
    for node in range(NODES):
        producer.send("orders", key=key_of(node), body=b"1")
    for line in lines:
        line.blackhole()
    for node in range(NODES):
        producer.send_oneway("orders", key=key_of(node), body=b"2")
    assert stop_in_silence(lines, lambda: producer.close(0.5)) < STOPPED_WITHIN_S
