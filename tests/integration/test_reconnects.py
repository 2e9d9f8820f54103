"""A node accepts connections and breaks each of them at the first large message: its clients pause longer each time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final

import pytest

from mqlayer import Receiver
from mqlayer.errors import PublishUnknown, StoreUnavailable
from mqlayer.producing import Producer
from tests.fixtures.consumers import Recorder, Stage, StartStage
from tests.fixtures.shared_members import share
from tests.fixtures.wait import awake_s, wait_until
from tests.proof.proxy import TcpProxy

LARGE = b"x" * 200_000
PASSING_BYTES = 60_000
"""More than a connection's beginning, and less than a large body."""
WATCHED_S = 1.5
MOST = 25
"""Connections in that time. Pauses double, up to a second or two; without them there are hundreds."""


@contextmanager
def publishing(stage: Stage, proxy: TcpProxy, _url: str) -> Iterator[None]:
    producer = Producer(stage.settings(), name="p")
    try:
        producer.send("orders", key="k", body=b"small")
        proxy.cut_after(client_bytes=PASSING_BYTES, times=10_000)
        with pytest.raises(PublishUnknown):
            producer.send("orders", key="k", body=LARGE, timeout_s=0.5)
        yield
    finally:
        proxy.heal()
        producer.close(10)


@contextmanager
def relaying(stage: Stage, proxy: TcpProxy, _url: str) -> Iterator[None]:
    proxy.cut_after(client_bytes=PASSING_BYTES, times=10_000)
    stage.world.rows("SELECT mqlayer_app.publish_v1('orders', 'k', %s)", LARGE)
    with stage.world.relay():
        yield
        proxy.heal()
        wait_until(lambda: "k" in stage.world.by_key(), timeout_s=20, what="the message to be relayed")


@contextmanager
def consuming(stage: Stage, proxy: TcpProxy, url: str, *, start: Callable[..., object]) -> Iterator[None]:
    recorder = Recorder()
    start(stage, recorder)
    send_directly(stage, url, b"small")
    wait_until(lambda: recorder.count() == 1, timeout_s=20, what="the first one handled")
    proxy.cut_after(server_bytes=PASSING_BYTES, times=10_000)
    send_directly(stage, url, LARGE)
    yield
    proxy.heal()
    wait_until(lambda: recorder.count() == 2, timeout_s=20, what="the second one handled")


@contextmanager
def receiving(stage: Stage, proxy: TcpProxy, url: str) -> Iterator[None]:
    with Receiver(stage.topic, group="g", start="earliest", settings=stage.settings()) as receiver:
        send_directly(stage, url, b"small")
        receiver.ack(receiver.receive(1, wait_s=10))
        proxy.cut_after(server_bytes=PASSING_BYTES, times=10_000)
        send_directly(stage, url, LARGE)
        with ThreadPoolExecutor(1) as pool:
            waiting, found = pool.submit(receiver.receive, 1, wait_s=20), None
            yield
            proxy.heal()
            with contextlib.suppress(StoreUnavailable):
                found = waiting.result()
        assert [one.body for one in found or receiver.receive(1, wait_s=10)] == [LARGE]


def send_directly(stage: Stage, url: str, body: bytes) -> None:
    """Send past the proxy."""
    with stage.sending_to(url):
        stage.send([("k", body)])


KINDS: Final[dict[str, Callable[[Stage, TcpProxy, str], AbstractContextManager[None]]]] = {
    "producer": publishing,
    "relay": relaying,
    "member": partial(consuming, start=Stage.consume),
    "shared member": partial(consuming, start=share),
    "receiver": receiving,
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_pauses_longer_after_each_failure(
    start_stage: StartStage, redis_url: str, proxy: TcpProxy, kind: str
) -> None:
    """A slot that moves, or a reply that no connection survives: hundreds of connections a second would keep it so."""
    stage = start_stage(f"redis://127.0.0.1:{proxy.port}/0")
    with KINDS[kind](stage, proxy, redis_url):
        before, began = proxy.accepted_count, awake_s()
        # Pauses are random: two tries may take longer.
        wait_until(
            lambda: awake_s() - began >= WATCHED_S and proxy.accepted_count - before >= 2,
            timeout_s=20, what="some tries",
        )  # fmt: skip
        assert proxy.accepted_count - before <= MOST
