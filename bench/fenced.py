"""Handlers whose transaction has the fence, against the same handlers and transaction without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import psycopg

import mqlayer
from bench.batches import INSERT, TABLE, Effects
from bench.consume import new_group
from bench.fill import fill
from bench.registry import Line, bench, compared, in_turn
from bench.stage import Stage, System

MESSAGES: Final = 5_000
BATCHED: Final = 30_000
ROUNDS: Final = 5
BATCH: Final = mqlayer.BatchOf("distinct", limit=100)


@bench("fenced")
def fenced(stage: Stage) -> Iterator[Line]:
    """Messages per second of one process that writes a row per message: a transaction for each, or for each batch."""
    system = stage.system(fsync="always")
    fill(system, BATCHED)
    with psycopg.connect(system.dsn, autocommit=True) as connection:
        connection.execute(TABLE)
    for name, count, batch, target in (
        ("fenced", MESSAGES, None, 0.7),
        ("fenced[batches]", BATCHED, BATCH, 0.9),
    ):
        kinds = {kind: partial(rate, system, count, batch, kind == "fenced") for kind in ("without", "fenced")}
        figures = in_turn(ROUNDS, kinds)
        yield compared(name, figures["fenced"], figures["without"], unit="msg/s", target=target)


def rate(system: System, count: int, batch: mqlayer.BatchOf | None, fence: bool) -> float:
    """Return how many messages per second are handled, of the first so many."""
    app, effects = mqlayer.App(system.settings), Effects(system.dsn)
    write = _write_one(effects, fence) if batch is None else _write_batch(effects, fence)
    app.consumer("bench", group=new_group(), batch=batch)(write)
    began = time.perf_counter()
    app.start()
    stats = app.members[0].stats
    while stats.settled < count:
        time.sleep(0.001)
    elapsed, settled = time.perf_counter() - began, stats.settled
    app.stop()
    effects.close()
    return settled / elapsed


def _write_one(effects: Effects, fence: bool) -> Callable[..., Any]:
    def write(body: bytes, ctx: mqlayer.Context) -> None:
        with effects.connection.transaction():
            if fence:
                ctx.fence(effects.connection)
            effects.connection.execute(INSERT, (ctx.key, len(body)))

    return write


def _write_batch(effects: Effects, fence: bool) -> Callable[..., Any]:
    def write(messages: mqlayer.Batch[bytes]) -> None:
        with effects.connection.transaction(), effects.connection.cursor() as cursor:
            todo = messages.fence(effects.connection) if fence else messages
            cursor.executemany(INSERT, [(message.key, len(message.value)) for message in todo])

    return write
