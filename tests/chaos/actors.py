"""The processes of a chaos run, each with a history: `python -m tests.chaos.actors ROLE NAME DIRECTORY`.

Writers publish a few keys in transactions of their own, some of which roll back, and pause as business code does.
Consumers write each message into a table through the fence. All end in order at SIGTERM, or are ended without warning.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import psycopg
from psycopg_pool import ConnectionPool

import mqlayer
from mqlayer.domain.routing import lp_of
from mqlayer.errors import AlreadyApplied, StaleOwner
from mqlayer.postgres.database import Connection
from mqlayer.relay import Relay
from tests.proof.history import Deliver, History, Publish

TOPIC: Final = "orders"
GROUP: Final = "ledger"
KEYS: Final = 60
FAILING: Final = int(os.environ.get("MQLAYER_TEST_FAILING", "0"))
"""Every so many messages fail at their first attempt; 0: none does."""
SINK: Final = """
CREATE TABLE sink (
    place bigserial PRIMARY KEY, key text, source int, lp int, seq bigint, epoch bigint, partition int, value text
)
"""


def write(name: str, directory: Path, stopping: threading.Event) -> None:
    """Publish until told to stop; go on after the database was away."""
    rng, turn = random.Random(name), 0
    with History(directory, name) as history:
        while not stopping.is_set():
            try:
                with psycopg.connect(os.environ["MQLAYER_DSN"]) as connection:
                    while not stopping.is_set():
                        turn += 1
                        _publish(connection, history, rng, f"{name}/{os.getpid()}/{turn}")
            except psycopg.Error:
                stopping.wait(0.1)


def _publish(connection: Connection, history: History, rng: random.Random, value: str) -> None:
    key = f"key-{rng.randrange(KEYS)}"
    operation = history.begin(Publish(topic=TOPIC, key=key, value=value))
    try:
        row = connection.execute("SELECT mqlayer_app.publish_v1(%s, %s, %s)", (TOPIC, key, value.encode())).fetchone()
        connection.execute("SELECT pg_sleep(%s)", (rng.random() * 0.004,))
        identity = {"source": 1, "lp": lp_of(key.encode()), "seq": row[0] if row else 0}
        if rng.random() < 0.1:
            connection.rollback()
            operation.fail(**identity)
            return
        connection.commit()
    except psycopg.Error:
        # A lost connection at COMMIT: nobody can tell.
        operation.info()
        raise
    operation.ok(**identity)


def relay(_name: str, _directory: Path, stopping: threading.Event) -> None:
    """Move the outbox to the partitions."""
    work = Relay(mqlayer.Settings())

    def end() -> None:
        stopping.wait()
        work.stop()

    threading.Thread(target=end, daemon=True).start()
    work.run()


def consume(name: str, directory: Path, stopping: threading.Event) -> None:
    """Write what comes into the sink."""
    app = mqlayer.App()
    pool = ConnectionPool(os.environ["MQLAYER_DSN"], min_size=1, max_size=6, timeout=5, open=True)
    history = History(directory, f"{name}-{os.getpid()}")

    @app.consumer(TOPIC, group=GROUP, backoff_s=(0.1, 0.2), options=mqlayer.MemberOptions(concurrency=6))
    def book(body: bytes, ctx: mqlayer.Context) -> None:
        source, lp, seq = ctx.identity
        facts: dict[str, Any] = {"key": ctx.key, "source": source, "lp": lp, "seq": seq, "value": body.decode()}
        facts |= {"partition": ctx.partition, "epoch": ctx.epoch}
        event = Deliver(topic=TOPIC, group=GROUP, attempt=ctx.attempt, **facts)
        operation = history.begin(event)
        try:
            with pool.connection() as connection:
                if FAILING and ctx.attempt == 1 and seq % FAILING == 0:
                    raise RuntimeError("planted")
                ctx.fence(connection)
                connection.execute(
                    "INSERT INTO sink (key, source, lp, seq, epoch, partition, value) VALUES "
                    "(%(key)s, %(source)s, %(lp)s, %(seq)s, %(epoch)s, %(partition)s, %(value)s)",
                    facts,
                )
        except AlreadyApplied:
            operation.ok()
            raise
        except StaleOwner:
            operation.fail()
            raise
        except Exception:
            operation.info()
            raise
        operation.ok()

    while not stopping.is_set():
        try:
            app.start()
            break
        except mqlayer.MqlayerError:
            stopping.wait(0.2)
    stopping.wait()
    app.stop()


ROLES: Final[dict[str, Callable[[str, Path, threading.Event], None]]] = {
    "writer": write,
    "relay": relay,
    "consumer": consume,
}


def main() -> None:
    """Play one role until SIGTERM."""
    role, name, directory = sys.argv[1:4]
    stopping = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, end)
    ROLES[role](name, Path(directory), stopping)


if __name__ == "__main__":
    main()
