"""dramatiq on Redis: its own default middleware, a worker of eight threads, a large prefetch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bench.peers.load import HANDLERS, CheckedHandler, KeyedBody
from bench.peers.peer import Peer, PeerServers, PublishBatch, client_module
from bench.peers.redis_servers import PERSISTENCE, STORED_IN_REDIS, one_redis

if TYPE_CHECKING:
    from bench.peers.ground import Ground

PREFETCH = "512"


class DramatiqActors(Peer):
    """An actor's messages, sent one by one: dramatiq has no call for a batch."""

    name = "dramatiq"
    packages = ("dramatiq[redis]", "hiredis")
    stored = STORED_IN_REDIS
    shape = "one queue, 8 threads"
    promises_order = False
    most_messages = 5_000
    sources = (
        "https://dramatiq.io/advanced.html",
        "https://redis.io/docs/latest/integrate/dramatiq/",
        PERSISTENCE,
    )

    @contextmanager
    def serve(self, ground: Ground) -> Iterator[PeerServers]:
        with one_redis(ground) as servers:
            yield servers._replace(versions=f"{ground.client_version(self, 'dramatiq')}, {servers.versions}")

    @contextmanager
    def publisher(self, url: str, queue: str) -> Iterator[PublishBatch]:
        broker, handle = actor(url, queue, lambda _body: None)

        def publish(batch: Sequence[KeyedBody]) -> None:
            for _, body in batch:
                handle.send(body.decode())

        yield publish
        broker.close()

    def consume(self, url: str, queue: str, handler: CheckedHandler) -> None:
        # The library reads it when it is imported.
        os.environ.update(dramatiq_queue_prefetch=PREFETCH)
        broker, _ = actor(url, queue, handler)
        worker = client_module("dramatiq").Worker(broker, worker_threads=HANDLERS)
        worker.start()
        handler.done.wait()
        worker.stop()


def actor(url: str, queue: str, handle: Any) -> tuple[Any, Any]:
    """Return a broker and its one actor."""
    dramatiq = client_module("dramatiq")
    broker = client_module("dramatiq.brokers.redis").RedisBroker(url=url)
    dramatiq.set_broker(broker)

    def run(body: str) -> None:
        handle(body)

    return broker, dramatiq.actor(actor_name="handle", queue_name=queue, broker=broker)(run)
