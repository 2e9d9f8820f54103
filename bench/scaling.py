"""Throughput of one, two and four processes whose handlers wait, against raw consumers of plain streams."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from bench.fill import fill
from bench.processes import CONSUME, ConsumerGroup, consumer_group, wait_until
from bench.registry import Line, bench, compared, note
from bench.stage import BATCH, BODY, KEYS, Stage, System

PARTITIONS: Final = 16
PROCESSES: Final = (1, 2, 4)
CONCURRENCY: Final = 8
WAIT_MS: Final = 2
EACH: Final = 6_000
"""Messages per process and round."""
COUNTED: Final = 0.9
"""Of a round's messages: at its end some processes have nothing to do any more."""
ROUNDS: Final = 3


@bench("scale_members")
def scale_members(stage: Stage) -> Iterator[Line]:
    """Messages per second of 1, 2 and 4 processes with 8 handlers at once, each of which waits 2 ms, over 16 partitions
    and 1,000 keys; the baseline is as many processes of 8 threads that read 16 plain streams by a native group, without
    any order of a key."""
    system = stage.system(partitions=PARTITIONS)
    logs = [f"raw-{number}" for number in range(PARTITIONS)]
    filled = 0
    for count in PROCESSES:
        with (
            consumer_group(system, BENCH_WAIT_MS=WAIT_MS) as ours,
            consumer_group(system, BENCH_WAIT_MS=WAIT_MS) as raw,
        ):
            start_raw(system, raw, logs, count)
            start_ours(system, ours, count)
            figures: dict[str, list[float]] = {"raw": [], "ours": []}
            for turn in range(ROUNDS + 1):
                messages = EACH * count
                rates = {
                    "raw": rate(raw, messages, partial(fill_raw, system, logs, messages)),
                    "ours": rate(ours, messages, partial(fill, system, messages, start=filled)),
                }
                filled += messages
                note(f"  {count} processes: " + ", ".join(f"{name} {value:,.0f}" for name, value in rates.items()))
                for name, value in rates.items():
                    # The first one warms up: streams, interpreters, and what the order was of starting.
                    figures[name] += [value] if turn else []
        medians = {name: statistics.median(values) for name, values in figures.items()}
        name = f"scale_members[{count} process{'es' if count > 1 else ''}]"
        yield compared(name, medians["ours"], medians["raw"], unit="msg/s", target=1.0)


def start_ours(system: System, members: ConsumerGroup, count: int) -> None:
    """Start members, and wait until each has its share."""
    for _ in range(count):
        members.start(*CONSUME, "--concurrency", str(CONCURRENCY))
    wait_until(lambda: sorted(shares(system, members.group)) == [PARTITIONS // count] * count)
    # Until they have taken their pull locks too.
    time.sleep(0.5)


def shares(system: System, group: str) -> list[int]:
    """Return how many partitions each member of a group owns."""
    with system.database.connection() as connection:
        rows = connection.execute(
            "SELECT count(*) FROM mqlayer.assignment a JOIN mqlayer.consumer_group g USING (group_id) "
            "WHERE g.name = %s AND a.member_id = a.target GROUP BY a.member_id",
            (group,),
        ).fetchall()
    return [int(row[0]) for row in rows]


def start_raw(system: System, members: ConsumerGroup, logs: list[str], count: int) -> None:
    """Start raw consumers, and wait until each is ready."""
    client = system.client()
    for log in logs:
        client.xgroup_create(log, members.group, "$", mkstream=True)
    for _ in range(count):
        members.start("-m", "bench.consumer_process", "raw", system.redis_url, str(CONCURRENCY), *logs)
    for worker in members.workers:
        worker.await_ready()


def fill_raw(system: System, logs: list[str], messages: int) -> None:
    """Append the same messages to plain streams."""
    client: Any = system.client()
    for first in range(0, messages, BATCH):
        pipeline = client.pipeline(transaction=False)
        for number in range(first, min(first + BATCH, messages)):
            pipeline.xadd(logs[number % len(logs)], {"k": KEYS[number % len(KEYS)], "b": BODY})
        pipeline.execute()


def rate(members: ConsumerGroup, messages: int, fill_up: Callable[[], None]) -> float:
    """Give a crew so many messages; return how many it handles in a second."""
    before = [worker.handled for worker in members.workers]
    # What fills must neither be measured nor take the processors from what is.
    for worker in members.workers:
        worker.process.send_signal(signal.SIGSTOP)
    fill_up()
    began_ns = time.monotonic_ns()
    for worker in members.workers:
        worker.process.send_signal(signal.SIGCONT)
    wait_until(lambda: sum(worker.handled for worker in members.workers) >= sum(before) + messages)
    times = sorted(one.at_ns for worker in members.workers for one in worker.notes(began_ns))
    counted = times[: int(messages * COUNTED)]
    return len(counted) / (counted[-1] - began_ns) * 1e9
