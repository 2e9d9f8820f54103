"""procrastinate: a lock per key, a worker with eight jobs at once, finished jobs deleted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bench.peers.load import HANDLERS, CheckedHandler, KeyedBody
from bench.peers.peer import Peer, PeerServers, PublishBatch, client_module
from bench.peers.postgres_databases import STORED_IN_POSTGRES

if TYPE_CHECKING:
    from bench.peers.ground import Ground

PATH_OF_SQL = "import procrastinate, pathlib; print(pathlib.Path(procrastinate.__file__).parent / 'sql' / 'schema.sql')"


class ProcrastinateJobs(Peer):
    """Jobs of many locks in one statement of its job manager; one row per job."""

    name = "procrastinate"
    packages = ("procrastinate", "psycopg[binary,pool]")
    stored = STORED_IN_POSTGRES
    in_postgres = True
    shape = "one queue, 8 jobs at once; a lock (the key) has one at a time"
    most_messages = 2_000
    sources = (
        "https://procrastinate.readthedocs.io/en/stable/howto/advanced/locks.html",
        "https://procrastinate.readthedocs.io/en/stable/howto/production/delete_finished_jobs.html",
        "https://procrastinate.readthedocs.io/en/stable/howto/basics/batch_defer.html",
    )

    @contextmanager
    def serve(self, ground: Ground) -> Iterator[PeerServers]:
        import psycopg

        dsn = ground.new_database()
        script = ground.client_path(self, PATH_OF_SQL)
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(script.read_text("utf-8").encode())
        versions = f"{ground.client_version(self, 'procrastinate')}, {ground.postgres_version()}"
        yield PeerServers(dsn, ground.pids(ground.postgres()), versions)

    @contextmanager
    def publisher(self, url: str, queue: str) -> Iterator[PublishBatch]:
        procrastinate = client_module("procrastinate")
        app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=url))
        task = registered(app, queue, None)
        with app.open():

            def publish(batch: Sequence[KeyedBody]) -> None:
                jobs = [task.configure(lock=key).make_new_job(body=body.decode()) for key, body in batch]
                app.job_manager.batch_defer_jobs(jobs)

            yield publish

    def consume(self, url: str, queue: str, handler: CheckedHandler) -> None:
        asyncio.run(run_worker(url, queue, handler))


def registered(app: Any, queue: str, handler: CheckedHandler | None) -> Any:
    """Return the one task of an application."""

    async def handle(body: str) -> None:
        if handler is not None:
            await handler.handle(body)

    logging.disable(logging.ERROR)
    return app.task(name="handle", queue=queue)(handle)


async def run_worker(url: str, queue: str, handler: CheckedHandler) -> None:
    """Run a worker until all is handled."""
    procrastinate = client_module("procrastinate")
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url, max_size=HANDLERS + 2))
    registered(app, queue, handler)
    async with app.open_async():
        running = asyncio.create_task(
            app.run_worker_async(
                queues=[queue], concurrency=HANDLERS, delete_jobs="successful", install_signal_handlers=False
            )
        )
        await asyncio.to_thread(handler.done.wait)
        running.cancel()
        await asyncio.wait([running])
