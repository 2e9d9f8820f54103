"""A queue that an application makes for itself: a table of Postgres, and SELECT … FOR UPDATE SKIP LOCKED."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bench.peers.load import HANDLERS, CheckedHandler, KeyedBody
from bench.peers.peer import QUEUES, Peer, PeerServers, PublishBatch, client_module
from bench.peers.postgres_databases import STORED_IN_POSTGRES

if TYPE_CHECKING:
    from bench.peers.ground import Ground

READ = 100
POLL_S = 0.01
INSERT = 'INSERT INTO "{}" (key, body) SELECT * FROM unnest(%s::text[], %s::bytea[])'
TAKE = """
    DELETE FROM "{0}" WHERE id = ANY (ARRAY(SELECT id FROM "{0}" ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED))
    RETURNING id, body
"""


class SkipLocked(Peer):
    """Rows inserted in one statement; a reader deletes some, handles them, and commits."""

    name = "skip-locked"
    stored = STORED_IN_POSTGRES
    in_postgres = True
    shape = "8 readers of one table"
    promises_order = False
    sources = ("https://www.postgresql.org/docs/current/sql-select.html#SQL-FOR-UPDATE-SHARE",)

    @contextmanager
    def serve(self, ground: Ground) -> Iterator[PeerServers]:
        import psycopg

        dsn = ground.new_database()
        with psycopg.connect(dsn, autocommit=True) as connection:
            for queue in QUEUES:
                table = f'"{queue}" (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text, body bytea)'
                connection.execute(f"CREATE TABLE {table}".encode())
        yield PeerServers(dsn, ground.pids(ground.postgres()), ground.postgres_version())

    @contextmanager
    def publisher(self, url: str, queue: str) -> Iterator[PublishBatch]:
        with connected(url) as connection:

            def publish(batch: Sequence[KeyedBody]) -> None:
                keys, bodies = [key for key, _ in batch], [body for _, body in batch]
                connection.execute(INSERT.format(queue), (keys, bodies))

            yield publish

    def consume(self, url: str, queue: str, handler: CheckedHandler) -> None:
        def read() -> None:
            with connected(url) as connection:
                while not handler.done.is_set():
                    with connection.transaction():
                        taken = sorted(connection.execute(TAKE.format(queue), (READ,)).fetchall())
                        for _, body in taken:
                            handler(body)
                    if not taken:
                        handler.done.wait(POLL_S)

        threads = [threading.Thread(target=read) for _ in range(HANDLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def connected(url: str) -> Any:
    """Return a connection."""
    return client_module("psycopg").connect(url, autocommit=True)
