"""Redis Streams without a library: a stream for each handler, keys divided by the application, native groups."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from bench.peers.load import HANDLERS, CheckedHandler, KeyedBody, part_of
from bench.peers.peer import Peer, PeerServers, PublishBatch, client_module
from bench.peers.redis_servers import PERSISTENCE, STORED_IN_REDIS, one_redis

if TYPE_CHECKING:
    from bench.peers.ground import Ground

READ = 500
GROUP = "bench"


class RawStreams(Peer):
    """XADD by pipelines, XREADGROUP and XACK by reads."""

    name = "streams"
    stored = STORED_IN_REDIS
    shape = "8 streams, one reader each; keys divided by the application"
    sources = (PERSISTENCE, "https://redis.io/docs/latest/develop/data-types/streams/")

    def serve(self, ground: Ground) -> AbstractContextManager[PeerServers]:
        return one_redis(ground)

    @contextmanager
    def publisher(self, url: str, queue: str) -> Iterator[PublishBatch]:
        client = connected(url)

        def publish(batch: Sequence[KeyedBody]) -> None:
            pipeline = client.pipeline(transaction=False)
            for key, body in batch:
                pipeline.xadd(f"{queue}-{part_of(key)}", {"k": key, "b": body})
            pipeline.execute()

        yield publish
        client.close()

    def consume(self, url: str, queue: str, handler: CheckedHandler) -> None:
        client = connected(url)

        def read(log: str) -> None:
            client.xgroup_create(log, GROUP, "0", mkstream=True)
            while not handler.done.is_set():
                for _, entries in client.xreadgroup(GROUP, "c", {log: ">"}, count=READ, block=100) or ():
                    for _, fields in entries:
                        handler(fields[b"b"])
                    client.xack(log, GROUP, *(entry_id for entry_id, _ in entries))

        threads = [threading.Thread(target=read, args=(f"{queue}-{part}",)) for part in range(HANDLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def connected(url: str) -> Any:
    """Return a client."""
    return client_module("redis").Redis.from_url(url, protocol=2)
