"""BullMQ on Redis: bulks of jobs, a worker with eight at once, finished jobs removed. Its clients run in Node."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bench.peers.load import CheckedHandler
from bench.peers.peer import Peer, PeerMissing, PeerServers, PublishBatch
from bench.peers.redis_servers import PERSISTENCE, STORED_IN_REDIS, one_redis

if TYPE_CHECKING:
    from bench.peers.ground import Ground

MODULES = ("bullmq", "ioredis")
CLIENT = Path(__file__).with_name("bullmq_client.cjs")


class BullmqJobs(Peer):
    """A script of Node in the place of `bench.peers.client`."""

    name = "bullmq"
    stored = STORED_IN_REDIS
    shape = "one queue, a worker with 8 jobs at once"
    promises_order = False
    most_messages = 5_000
    sources = (
        "https://docs.bullmq.io/guide/queues/adding-bulks",
        "https://docs.bullmq.io/guide/workers/concurrency",
        "https://docs.bullmq.io/guide/going-to-production",
        PERSISTENCE,
    )

    @contextmanager
    def serve(self, ground: Ground) -> Iterator[PeerServers]:
        if shutil.which("node") is None or shutil.which("npm") is None:
            raise PeerMissing("needs node and npm in PATH")
        modules = ground.node_packages(self, MODULES)
        modules.ensure()
        node = ground.version_of(Path("node"), "--version")
        with one_redis(ground) as servers:
            yield servers._replace(versions=f"bullmq {modules.version('bullmq')}, Node {node}, {servers.versions}")

    def publisher(self, url: str, queue: str) -> AbstractContextManager[PublishBatch]:
        raise NotImplementedError

    def consume(self, url: str, queue: str, handler: CheckedHandler) -> None:
        raise NotImplementedError

    def client(self, ground: Ground) -> list[str | Path]:
        return ["node", CLIENT, ground.node_packages(self, MODULES).place]
