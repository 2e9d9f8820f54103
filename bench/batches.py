"""Batch handlers against handlers of single messages, of the same records: no-op, and with an effect in Postgres."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg

import mqlayer
from bench.consume import new_group
from bench.fill import fill
from bench.registry import Line, bench, compared, in_turn
from bench.stage import Stage, System

FENCED = 10_000
PLAIN = 100_000
ROUNDS = 3
TABLE = "CREATE TABLE effect (key text, size int)"
INSERT = "INSERT INTO effect VALUES (%s, %s)"
BATCHES = {
    "distinct": mqlayer.BatchOf("distinct", limit=100),
    "key": mqlayer.BatchOf("key", limit=100),
}


@bench("consume_batch")
def consume_batch(stage: Stage) -> Iterator[Line]:
    """Messages per second of one process over one partition and a thousand keys. The baseline is a handler of single
    messages; with the fence, of both a row per message is written, in one transaction for each message or batch."""
    system = stage.system(fsync="always")
    fill(system, PLAIN)
    figures = in_turn(ROUNDS, {"single": partial(ours, system, PLAIN, None, False)} | _batches(system, PLAIN, False))
    for name in BATCHES:
        yield compared(f"consume_batch[{name}]", figures[name], figures["single"], unit="msg/s", target=None)
    system = stage.system(fsync="always")
    fill(system, FENCED)
    with psycopg.connect(system.dsn, autocommit=True) as connection:
        connection.execute(TABLE)
    figures = in_turn(ROUNDS, {"single": partial(ours, system, FENCED, None, True)} | _batches(system, FENCED, True))
    for name in BATCHES:
        yield compared(f"consume_batch[{name}, fenced]", figures[name], figures["single"], unit="msg/s", target=None)


def _batches(system: System, count: int, fenced: bool) -> dict[str, Callable[[], float]]:
    return {name: partial(ours, system, count, batch, fenced) for name, batch in BATCHES.items()}


def ours(system: System, count: int, batch: mqlayer.BatchOf | None, fenced: bool) -> float:
    """Consume so many messages; the clock stops when the last one is settled on the node."""
    app = mqlayer.App(system.settings)
    effects = Effects(system.dsn) if fenced else None
    app.consumer("bench", group=new_group(), batch=batch)(_handler(effects, batch))
    began = time.perf_counter()
    app.start()
    member = app.members[0]
    while member.stats.settled < count:
        time.sleep(0.001)
    elapsed = time.perf_counter() - began
    app.stop()
    if effects is not None:
        effects.close()
    return count / elapsed


class Effects:
    """A connection for each thread that writes effects."""

    def __init__(self, dsn: str) -> None:
        self._dsn, self._local = dsn, threading.local()
        self._all: list[psycopg.Connection] = []

    @property
    def connection(self) -> psycopg.Connection:
        """The connection of this thread."""
        if not hasattr(self._local, "connection"):
            self._local.connection = psycopg.connect(self._dsn, autocommit=True)
            self._all.append(self._local.connection)
        found: psycopg.Connection = self._local.connection
        return found

    def close(self) -> None:
        """Close them all."""
        for connection in self._all:
            connection.close()


def _handler(effects: Effects | None, batch: mqlayer.BatchOf | None) -> Callable[..., Any]:
    def ignore(_body: bytes) -> None:
        pass

    def ignore_all(_bodies: list[bytes]) -> None:
        pass

    def write(body: bytes, ctx: mqlayer.Context) -> None:
        assert effects is not None
        with effects.connection.transaction():
            ctx.fence(effects.connection)
            effects.connection.execute(INSERT, (ctx.key, len(body)))

    def write_all(messages: mqlayer.Batch[bytes]) -> None:
        assert effects is not None
        with effects.connection.transaction(), effects.connection.cursor() as cursor:
            todo = messages.fence(effects.connection)
            cursor.executemany(INSERT, [(message.key, len(message.value)) for message in todo])

    if effects is None:
        return ignore if batch is None else ignore_all
    return write if batch is None else write_all
