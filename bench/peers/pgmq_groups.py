"""pgmq: the extension's own SQL, which its Python package carries, in message groups."""

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

VISIBILITY_TIMEOUT_S = 60
READ = 500
SEND = "SELECT pgmq.send_batch(%s, %s::jsonb[], %s::jsonb[])"
TAKE = "SELECT msg_id, message ->> 'b' FROM pgmq.read_grouped_head_with_poll(%s, %s, %s, 1, 5) ORDER BY msg_id"
PATH_OF_SQL = "import pgmq.sql, pathlib; print(pathlib.Path(pgmq.sql.__file__).with_name('pgmq.sql'))"


class PgmqGroups(Peer):
    """Batches in one statement; reads take the messages of some groups, and delete them when handled."""

    name = "pgmq"
    packages = ("pgmq", "psycopg[binary]")
    stored = STORED_IN_POSTGRES
    in_postgres = True
    shape = "8 readers; a group (the key) has one at a time"
    most_messages = 20_000
    sources = (
        "https://github.com/pgmq/pgmq/blob/main/docs/fifo-queues.md",
        "https://github.com/pgmq/pgmq/blob/main/INSTALLATION.md",
    )

    @contextmanager
    def serve(self, ground: Ground) -> Iterator[PeerServers]:
        import psycopg

        dsn = ground.new_database()
        script = ground.client_path(self, PATH_OF_SQL)
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(script.read_text("utf-8").encode())
            for queue in QUEUES:
                connection.execute("SELECT pgmq.create(%s)", (queue,))
                connection.execute("SELECT pgmq.create_fifo_index(%s)", (queue,))
        versions = f"{ground.client_version(self, 'pgmq')}, {ground.postgres_version()}"
        yield PeerServers(dsn, ground.pids(ground.postgres()), versions)

    @contextmanager
    def publisher(self, url: str, queue: str) -> Iterator[PublishBatch]:
        with connected(url) as connection:

            def publish(batch: Sequence[KeyedBody]) -> None:
                bodies = [f'{{"b": "{body.decode()}"}}' for _, body in batch]
                groups = [f'{{"x-pgmq-group": "{key}"}}' for key, _ in batch]
                connection.execute(SEND, (queue, bodies, groups))

            yield publish

    def consume(self, url: str, queue: str, handler: CheckedHandler) -> None:
        def read() -> None:
            with connected(url) as connection:
                while not handler.done.is_set():
                    taken = connection.execute(TAKE, (queue, VISIBILITY_TIMEOUT_S, READ)).fetchall()
                    for _, body in taken:
                        handler(body)
                    if taken:
                        connection.execute("SELECT pgmq.delete(%s, %s)", (queue, [number for number, _ in taken]))

        threads = [threading.Thread(target=read) for _ in range(HANDLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def connected(url: str) -> Any:
    """Return a connection."""
    return client_module("psycopg").connect(url, autocommit=True)
