"""Processor time per message of the outbox's path and of fenced effects, by part: the costs of `bench.model`."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import psycopg

import mqlayer
from bench.consume import new_group
from bench.fill import fill
from bench.growth.measure import TICK_S, node_cpu_s
from bench.latency import process
from bench.lease_cost import alone, postgres_cpu_s, stat_of
from bench.processes import wait_until
from bench.registry import Line, bench
from bench.stage import BATCH, BODY, KEYS, Stage, System
from mqlayer import outbox
from mqlayer.redis.keys import partition_keys

SINGLE: Final = 3_000
MANY: Final = 50_000
FENCED: Final = 5_000
Work = Callable[[], object]


@bench("path_costs")
def path_costs(stage: Stage) -> Iterator[Line]:
    """Processor time per message: publishing in transactions of one message and of 500, relaying these, and handlers
    that write one fenced row, one by one and in batches of 100. There is nothing to compare with."""
    system = stage.system(partitions=8)
    yield from lines("outbox, transactions of 1", SINGLE, measured(system, lambda: publish(system, SINGLE, 1)))
    yield from lines("outbox, transactions of 500", MANY, measured(system, lambda: publish(system, MANY, BATCH)))
    yield from lines("relay", MANY, relayed(system))
    system = stage.system()
    fill(system, FENCED)
    with psycopg.connect(system.dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE effect (key text, size int)")
    for name, batch in (("fence", None), ("fence, batches of 100", mqlayer.BatchOf("distinct", limit=100))):
        yield from lines(name, FENCED, measured(system, lambda: consume(system, batch)))  # noqa: B023


def lines(name: str, count: int, used_s: dict[str, float]) -> Iterator[Line]:
    """Return a line per part."""
    for part, seconds in used_s.items():
        yield alone(f"path_costs[{name}, {part}]", seconds / count * 1e6, "us per message")


def measured(system: System, work: Work) -> dict[str, float]:
    """Return the processor seconds of some work in this process."""
    client = system.client()
    before = (time.process_time(), node_cpu_s(client), postgres_cpu_s(system.dsn))
    work()
    after = (time.process_time(), node_cpu_s(client), postgres_cpu_s(system.dsn))
    client.close()
    return dict(zip(("process", "node", "Postgres"), (b - a for a, b in zip(before, after, strict=True)), strict=True))


def publish(system: System, count: int, each: int) -> None:
    """Publish in transactions of so many messages."""
    with psycopg.connect(system.dsn) as connection:
        for first in range(0, count, each):
            with outbox.transaction(connection) as tx:
                for number in range(first, first + each):
                    tx.publish("bench", key=KEYS[number % len(KEYS)], body=BODY)


def relayed(system: System) -> dict[str, float]:
    """Return the processor seconds of a relay's process, Postgres and the node while the relay works off an outbox."""
    client = system.client()
    with process(system, "-m", "mqlayer", "relay") as relay:
        # Its start does not count: it is about as long as relaying 50,000 messages.
        wait_until(lambda: appended(system) >= SINGLE + MANY)
        relay.send_signal(signal.SIGSTOP)
        publish(system, MANY, BATCH)
        before = (cpu_s(relay.pid), node_cpu_s(client), postgres_cpu_s(system.dsn))
        relay.send_signal(signal.SIGCONT)
        wait_until(lambda: appended(system) >= SINGLE + 2 * MANY)
        after = (cpu_s(relay.pid), node_cpu_s(client), postgres_cpu_s(system.dsn))
    client.close()
    return dict(zip(("process", "node", "Postgres"), (b - a for a, b in zip(before, after, strict=True)), strict=True))


def cpu_s(pid: int) -> float:
    """Return the processor seconds of a process."""
    fields = stat_of(pid)
    return (int(fields[11]) + int(fields[12])) * TICK_S


def appended(system: System) -> int:
    """Return how many messages the topic's streams have."""
    logs = [partition_keys(system.settings.key_prefix, part.partition).log for part in system.route.ranges]
    with system.client() as client:
        return sum(int(client.xlen(log)) for log in logs)  # type: ignore[arg-type]


def consume(system: System, batch: mqlayer.BatchOf | None) -> None:
    """Handle all messages, each with a fenced row."""
    app, local = mqlayer.App(system.settings), threading.local()
    opened: list[psycopg.Connection] = []

    def connection() -> psycopg.Connection:
        if not hasattr(local, "connection"):
            local.connection = psycopg.connect(system.dsn, autocommit=True)
            opened.append(local.connection)
        found: psycopg.Connection = local.connection
        return found

    def write(body: bytes, ctx: mqlayer.Context) -> None:
        with connection().transaction():
            ctx.fence(connection())
            connection().execute("INSERT INTO effect VALUES (%s, %s)", (ctx.key, len(body)))

    def write_all(messages: mqlayer.Batch[bytes]) -> None:
        with connection().transaction(), connection().cursor() as cursor:
            todo = messages.fence(connection())
            rows = [(message.key, len(message.value)) for message in todo]
            cursor.executemany("INSERT INTO effect VALUES (%s, %s)", rows)

    handler: Any = write if batch is None else write_all
    app.consumer("bench", group=new_group(), batch=batch)(handler)
    app.start()
    wait_until(lambda: app.members[0].stats.settled >= FENCED)
    app.stop()
    for one in opened:
        one.close()
