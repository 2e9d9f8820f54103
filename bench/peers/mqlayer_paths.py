"""mqlayer itself, by both ways of publishing."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bench.peers.load import HANDLERS, CheckedHandler, KeyedBody
from bench.peers.peer import QUEUES, Peer, PeerServers, PublishBatch, client_module
from bench.peers.redis_servers import STORED_IN_REDIS

if TYPE_CHECKING:
    from bench.peers.ground import Ground

PARTITIONS = 4
PUBLISH = "SELECT mqlayer_app.publish_many_v1(%s::text[], %s::text[], %s::bytea[])"


class MqlayerDirect(Peer):
    """A producer that sends to Redis."""

    name = "mqlayer-direct"
    stored = STORED_IN_REDIS
    shape = "4 partitions of one member, 8 handlers; a key has one at a time"
    sources = ("docs/how-to/publish-directly.md", "docs/how-to/consume.md")

    @contextmanager
    def serve(self, ground: Ground) -> Iterator[PeerServers]:
        system = ground.mqlayer_system(QUEUES, PARTITIONS)
        pids = (*ground.pids(ground.redis()), *ground.pids(ground.postgres()))
        versions = f"{ground.mqlayer_version()}, {ground.redis_version()}, {ground.postgres_version()}"
        yield PeerServers(system.dsn, pids, versions)

    @contextmanager
    def publisher(self, url: str, queue: str) -> Iterator[PublishBatch]:
        message = client_module("mqlayer.producing").Message
        with client_module("mqlayer.producing").Producer(
            settings_of(url), name=f"bench-{uuid.uuid4().hex}"
        ) as producer:

            def publish(batch: Sequence[KeyedBody]) -> None:
                producer.send_many(queue, [message(key, body) for key, body in batch])

            yield publish

    def consume(self, url: str, queue: str, handler: CheckedHandler) -> None:
        mqlayer = client_module("mqlayer")
        app = mqlayer.App(settings_of(url))

        def handle(body: bytes) -> None:
            handler(body)

        # Annotations are texts here, and the type is asked for at run time.
        handle.__annotations__["body"] = bytes
        app.consumer(queue, group="bench", options=mqlayer.MemberOptions(concurrency=HANDLERS))(handle)
        app.start()
        handler.done.wait()
        app.stop()


class MqlayerOutbox(MqlayerDirect):
    """Transactions of the application's database, and a relay."""

    name = "mqlayer-outbox"
    stored = "committed and synced in one Postgres, with the application's own rows"
    sources = ("docs/how-to/publish.md", "docs/how-to/consume.md")

    @contextmanager
    def serve(self, ground: Ground) -> Iterator[PeerServers]:
        with super().serve(ground) as servers:
            environment = os.environ | {"MQLAYER_DSN": servers.url, "MQLAYER_LOG_LEVEL": "ERROR"}
            with subprocess.Popen([sys.executable, "-m", "mqlayer", "relay"], env=environment) as relay:
                try:
                    yield servers._replace(pids=(*servers.pids, relay.pid))
                finally:
                    relay.terminate()

    @contextmanager
    def publisher(self, url: str, queue: str) -> Iterator[PublishBatch]:
        with client_module("psycopg").connect(url, autocommit=True) as connection:

            def publish(batch: Sequence[KeyedBody]) -> None:
                keys, bodies = [key for key, _ in batch], [body for _, body in batch]
                connection.execute(PUBLISH, ([queue] * len(batch), keys, bodies))

            yield publish


def settings_of(dsn: str) -> Any:
    """Return settings for both databases in one."""
    secret = client_module("pydantic").SecretStr(dsn)
    return client_module("mqlayer.settings").Settings(dsn=secret)
