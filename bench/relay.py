"""The relay on a backlog, against a naive loop without any guarantee: SELECT 500, pipelined XADD, DELETE."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

import psycopg

from bench.registry import Line, bench, compared, in_turn
from bench.stage import BATCH, BODY, FSYNCS, KEYS, Stage, System, line_name
from mqlayer import outbox
from mqlayer.relay import Relay

BACKLOG = 100_000
PARTITIONS = 8
ROUNDS = 3
POLL_S = 0.001
Headers = Callable[[int], Mapping[str, str] | None]
FILL = 10_000

NAIVE_TABLE = "CREATE TABLE public.naive_outbox (id bigserial PRIMARY KEY, key text NOT NULL, body bytea NOT NULL)"


@bench("relay")
def relay(stage: Stage) -> Iterator[Line]:
    """Messages per second from the outbox to Redis, on the same backlog, from start to the last answer."""
    for fsync in FSYNCS:
        system = stage.system(fsync=fsync, partitions=PARTITIONS)
        with psycopg.connect(system.dsn) as connection:
            connection.execute(NAIVE_TABLE)
        figures = in_turn(ROUNDS, {"naive": lambda: run_naive(system), "relay": lambda: run_relay(system)})  # noqa: B023
        yield compared(line_name("relay", fsync), figures["relay"], figures["naive"], unit="messages/s", target=1.5)


def run_relay(system: System, headers: Headers = lambda _: None) -> float:
    """Fill the outbox, with headers by number, and let a relay empty it."""
    fill_outbox(system, headers)
    relay = Relay(system.settings)
    running = threading.Thread(target=relay.run)
    began = time.perf_counter()
    running.start()
    while relay.appended_count < BACKLOG and running.is_alive():
        time.sleep(POLL_S)
    seconds = time.perf_counter() - began
    relay.stop()
    running.join()
    if relay.appended_count != BACKLOG:
        raise RuntimeError(f"{relay.appended_count} messages of {BACKLOG} were relayed")
    return BACKLOG / seconds


def run_naive(system: System) -> float:
    """Fill a table and empty it as is often done: order, duplicates and loss are left to luck."""
    with psycopg.connect(system.dsn) as connection, system.client() as client:
        rows = [(KEYS[number % len(KEYS)], BODY) for number in range(BACKLOG)]
        with connection.cursor() as cursor, cursor.copy("COPY public.naive_outbox (key, body) FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
        connection.commit()
        began = time.perf_counter()
        for _ in range(BACKLOG // BATCH):
            found = connection.execute(
                "SELECT id, key, body FROM public.naive_outbox ORDER BY id LIMIT %s", (BATCH,)
            ).fetchall()
            pipeline = client.pipeline(transaction=False)
            for _, key, body in found:
                pipeline.xadd("naive", {"k": key, "b": body})
            pipeline.execute()
            connection.execute("DELETE FROM public.naive_outbox WHERE id = ANY(%s)", ([row[0] for row in found],))
            connection.commit()
        seconds = time.perf_counter() - began
        client.delete("naive")
    return BACKLOG / seconds


def fill_outbox(system: System, headers: Headers) -> None:
    """Publish the backlog, each key in turn."""
    with psycopg.connect(system.dsn) as connection:
        for first in range(0, BACKLOG, FILL):
            with outbox.transaction(connection) as tx:
                for number in range(first, first + FILL):
                    tx.publish("bench", key=KEYS[number % len(KEYS)], body=BODY, headers=headers(number))
