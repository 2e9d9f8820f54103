"""End-to-end latency at an open-loop rate: from the call that publishes to the handler, in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from bench.registry import Line, bench, compared, note
from bench.stage import BODY, KEYS, Stage, System
from mqlayer.producing import Producer

RATE_PER_S = 1_000
COUNT = 10_000
AIM_MS = 25.0
OUTBOX_CLIENTS = 8

Publish = Callable[[str, bytes], object]


@bench("latency_direct")
def latency_direct(stage: Stage) -> Iterator[Line]:
    """Published by a producer; the baseline is XADD and a native group, at the same rate."""
    system = stage.system(partitions=4)
    raw = measure_raw(system)
    with Producer(system.settings, name="bench") as producer:
        ours = measure(system, [lambda key, body: producer.send_oneway("bench", key=key, body=body)])
    yield from lines("latency_direct", ours, raw)


@bench("latency_outbox")
def latency_outbox(stage: Stage) -> Iterator[Line]:
    """Published in small transactions of 8 clients, through a relay; the baseline is XADD and a native group.

    The floor is an INSERT, and behind its commit an XADD by the same client: what waits for disks, without a relay.
    """
    system = stage.system(partitions=4)
    raw, floor = measure_raw(system), measure_floor(system)
    with process(system, "-m", "mqlayer", "relay"):
        connections = [psycopg.connect(system.dsn, autocommit=True) for _ in range(OUTBOX_CLIENTS)]
        ours = measure(system, [publisher(connection) for connection in connections])
        for connection in connections:
            connection.close()
    yield from lines("latency_outbox", ours, raw)
    for quantile in ("p50", "p99"):
        one = f"{quantile}_ms"
        yield compared(f"latency_outbox[floor, {quantile}]", ours[one], floor[one], unit=f"ms {quantile}", target=None)


def lines(name: str, ours: dict[str, float], raw: dict[str, float]) -> Iterator[Line]:
    """Return the line for p99, which the aim is set for, and the one for p50."""
    yield compared(name, ours["p99_ms"], raw["p99_ms"], unit="ms p99", target=AIM_MS)
    yield compared(f"{name}[p50]", ours["p50_ms"], raw["p50_ms"], unit="ms p50", target=None)


def publisher(connection: psycopg.Connection) -> Publish:
    """Return what publishes a message in a transaction of its own."""

    def publish(key: str, body: bytes) -> object:
        return connection.execute("SELECT mqlayer_app.publish_v2('bench', %s, %s)", (key, body))

    return publish


def measure_raw(system: System) -> dict[str, float]:
    """Return the latencies of plain streams."""
    client = system.client()
    return _of_stream(system, "raw", lambda log: [lambda key, body: client.xadd(log, {"k": key, "b": body})])


def measure_floor(system: System) -> dict[str, float]:
    """Return the latencies of an INSERT and an XADD, one after the other."""
    connections = [psycopg.connect(system.dsn, autocommit=True) for _ in range(OUTBOX_CLIENTS)]
    connections[0].execute("CREATE TABLE public.floor (id bigserial PRIMARY KEY, key text, body bytea)")
    found = _of_stream(system, "floor", lambda log: [_floor(system, one, log) for one in connections])
    for connection in connections:
        connection.close()
    return found


def _floor(system: System, connection: psycopg.Connection, log: str) -> Publish:
    client = system.client()

    def publish(key: str, body: bytes) -> None:
        connection.execute("INSERT INTO public.floor (key, body) VALUES (%s, %s)", (key, body))
        client.xadd(log, {"k": key, "b": body})

    return publish


def _of_stream(system: System, name: str, publishers: Callable[[str], list[Publish]]) -> dict[str, float]:
    log = f"{name}-{uuid.uuid4().hex[:8]}"
    with process(system, "-m", "bench.actors", "raw", system.redis_url, log, str(COUNT)) as taker:
        await_line(taker)
        drive(publishers(log))
        return result(taker, name)


def measure(system: System, publishers: list[Publish]) -> dict[str, float]:
    """Return our latencies."""
    with process(system, "-m", "bench.actors", "member", f"g{uuid.uuid4().hex[:8]}", str(COUNT)) as taker:
        await_line(taker)
        drive(publishers)
        return result(taker, "ours")


def drive(publishers: list[Publish]) -> None:
    """Publish at the rate, whatever becomes of it: a late answer does not slow the next call of another thread."""
    threads = [threading.Thread(target=_drive, args=(p, n, len(publishers))) for n, p in enumerate(publishers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _drive(publish: Publish, number: int, of: int) -> None:
    began = time.monotonic()
    for turn in range(number, COUNT, of):
        due = began + turn / RATE_PER_S
        time.sleep(max(0.0, due - time.monotonic()))
        # The clock runs from when it was due: a publisher that falls behind must not hide it.
        sent_ns = int(due * 1e9)
        publish(KEYS[turn % len(KEYS)], b"%020d" % sent_ns + BODY[20:])


@contextmanager
def process(system: System, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process on the system's addresses; it ends with the block."""
    environment = os.environ | {"MQLAYER_DSN": system.dsn, "MQLAYER_LOG_LEVEL": "WARNING"}
    with subprocess.Popen([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.terminate()


def await_line(running: subprocess.Popen[str]) -> str:
    """Return the next line that a process prints."""
    line = running.stdout.readline() if running.stdout is not None else ""
    if not line:
        raise RuntimeError("the process ended without a word")
    return line


def result(running: subprocess.Popen[str], name: str) -> dict[str, float]:
    """Return what a taker found."""
    figures: dict[str, float] = json.loads(await_line(running))
    note(f"  {name}: {figures}")
    return figures
