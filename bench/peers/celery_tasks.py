"""Celery on Redis: late acknowledgements, results ignored, a pool of eight threads, a large prefetch."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from bench.peers.load import HANDLERS, CheckedHandler, KeyedBody
from bench.peers.peer import Peer, PeerServers, PublishBatch, client_module
from bench.peers.redis_servers import PERSISTENCE, STORED_IN_REDIS, one_redis

if TYPE_CHECKING:
    from bench.peers.ground import Ground

TASK = "bench.handle"


class CeleryTasks(Peer):
    """A task per message, sent one by one on a kept connection: Celery has no call for a batch."""

    name = "celery"
    packages = ("celery[redis]", "hiredis")
    stored = STORED_IN_REDIS
    shape = "one queue, 8 threads"
    promises_order = False
    most_messages = 2_000
    sources = (
        "https://docs.celeryq.dev/en/stable/userguide/optimizing.html",
        "https://docs.celeryq.dev/en/stable/getting-started/backends-and-brokers/redis.html",
        PERSISTENCE,
    )

    @contextmanager
    def serve(self, ground: Ground) -> Iterator[PeerServers]:
        with one_redis(ground) as servers:
            yield servers._replace(versions=f"{ground.client_version(self, 'celery')}, {servers.versions}")

    @contextmanager
    def publisher(self, url: str, queue: str) -> Iterator[PublishBatch]:
        app = celery_app(url)
        with app.connection_for_write() as connection, app.amqp.Producer(connection) as producer:

            def publish(batch: Sequence[KeyedBody]) -> None:
                for _, body in batch:
                    app.send_task(TASK, (body.decode(),), queue=queue, producer=producer, ignore_result=True)

            yield publish

    def consume(self, url: str, queue: str, handler: CheckedHandler) -> None:
        app = celery_app(url)

        def handle(body: str) -> None:
            handler(body)

        app.task(name=TASK)(handle)
        state = client_module("celery.worker.state")

        def stop() -> None:
            handler.done.wait()
            state.should_stop = 0

        threading.Thread(target=stop, daemon=True).start()
        options = ["--pool=threads", f"--concurrency={HANDLERS}", f"--queues={queue}", "--loglevel=CRITICAL"]
        options += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        with suppress(SystemExit):
            app.worker_main(["worker", *options])


def celery_app(url: str) -> Any:
    """Return an application with the settings for many short tasks."""
    app = client_module("celery").Celery("bench", broker=url)
    app.conf.update(
        task_acks_late=True,
        task_ignore_result=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=64,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        # The figures go there.
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
    )
    return app
