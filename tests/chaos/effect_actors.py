"""Processes with effects by the inbox and by versions, to be killed: `python -m tests.chaos.effect_actors ROLE`."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Final

import mqlayer
from mqlayer.idempotency import set_version, watch_versions
from mqlayer.maintenance import clean_inbox
from mqlayer.postgres.database import Database
from tests.chaos.actors import Connections
from tests.proof.runtimes import runtime_of

TOPIC: Final = "orders"
GROUP: Final = "g"
SINK: Final = "CREATE TABLE sink (position bigserial, entity text, value text)"
INTO_SINK: Final = "INSERT INTO sink (entity, value) VALUES (%s, %s)"


def note() -> None:
    """Have an effect for each message, by the inbox."""
    app = mqlayer.App()
    pool = Connections(app.settings.application_dsn())

    @app.consumer(TOPIC, group=GROUP, ordered=False, backoff_s=(0.05,))
    def handle(body: bytes, ctx: mqlayer.Context) -> None:
        with pool.connection() as connection:
            ctx.inbox(connection)
            connection.execute(INTO_SINK, ("", body.decode()))

    _run(app)


def version() -> None:
    """Have an effect for each version of an entity, in order."""
    app, versions = mqlayer.App(), mqlayer.Versions("sink")
    pool = Connections(app.settings.application_dsn())

    @app.consumer(TOPIC, group=GROUP, ordered=False, backoff_s=(0.05,))
    def handle(body: bytes, ctx: mqlayer.Context) -> None:
        entity, number = body.decode().split(":")
        with pool.connection() as connection:
            for event in versions.take(connection, ctx, entity=entity, version=int(number)):
                connection.execute(INTO_SINK, event.body.decode().split(":"))

    _run(app)


def clean() -> None:
    """Forget all of the inbox that may be forgotten."""
    settings = mqlayer.Settings()
    with Database(settings.control_dsn()) as database:
        clean_inbox(runtime_of(database, settings.key_prefix, application=database), horizon_s=0.0)


def watch() -> None:
    """Raise alarms; say how many."""

    @mqlayer.on_event
    def hear(event: mqlayer.Event) -> None:
        sys.stdout.write(f"{event.kind}\n")

    with Database(mqlayer.Settings().application_dsn()) as database:
        watch_versions(database)
    sys.stdout.flush()


def say() -> None:
    """Say where an entity goes on."""
    with Database(mqlayer.Settings().control_dsn()) as database:
        set_version(
            runtime_of(database, application=database, actor="test"), name="sink", entity="e", version=1, reason="lost"
        )


def _run(app: mqlayer.App) -> None:
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.set())
    app.start()
    stopping.wait()
    app.stop()


ROLES: Final[dict[str, Callable[[], None]]] = {
    "note": note,
    "version": version,
    "clean": clean,
    "watch": watch,
    "say": say,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]]()
