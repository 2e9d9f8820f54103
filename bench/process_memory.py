"""Bytes of processes: consumers, relays and producers, by partition, LP, parked key and waiting message."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Final

import psycopg

from bench.fill import fill
from bench.latency import await_line, process
from bench.memory_process import keys_of, topic_name
from bench.node_memory import COUNT, Parking
from bench.registry import Line, bench, compared, note
from bench.stage import BODY, KEYS, Stage, System
from mqlayer.domain.routing import LP_COUNT
from mqlayer.domain.sizing import Figures
from mqlayer.topics import create_topic

FEW: Final = 4
MANY: Final = 512
AHEAD: Final = 40_000
PREFETCH: Final = 4_000
CONSUMERS: Final = 9
TOPICS: Final = 33
BACKLOG: Final = 300_000
PENDING: Final = 100_000
SAMPLES: Final = 3


@bench("process_memory")
def process_memory(stage: Stage) -> Iterator[Line]:
    """Resident bytes of a process that has little to do, and what each partition, LP, parked key and waiting message
    adds without its body. All against the figures with which `mqlayer size` computes."""
    yield from of_consumers(stage)
    yield from of_relays(stage)
    yield from of_producers(stage)


def line(what: str, measured: float, figure: float) -> Line:
    """Return a line against a figure."""
    return compared(f"process_memory[{what}]", measured, figure, unit="B", target=1.0)


def resident(system: System, *words: object) -> int:
    """Return the highest figure over some seconds of a process."""
    with process(system, "-m", "bench.memory_process", *map(str, words)) as one:
        figures = [int(json.loads(await_line(one))["rss"]) for _ in range(SAMPLES)]
        one.kill()
    note(f"  {words}: {max(figures) / 1e6:.1f} MB")
    return max(figures)


def of_consumers(stage: Stage) -> Iterator[Line]:
    """Yield lines of a consumer, its partitions, parked keys and records read ahead."""
    system = stage.system(fsync="everysec", partitions=FEW)
    idle = resident(system, "consumer", 1, PREFETCH, "idle")
    yield line("consumer", idle, Figures.process_bytes)
    more = resident(system, "consumer", CONSUMERS, PREFETCH, "more")
    yield line("next consumer of a process", (more - idle) / (CONSUMERS - 1), Figures.process_consumer)
    parking = Parking(system)
    parking.park(1)
    parking.leave()
    with psycopg.connect(system.dsn, autocommit=True) as session:
        # A consumer's groups end in a number: see `memory_process`.
        session.execute("UPDATE mqlayer.consumer_group SET name = 'parked-0' WHERE name = %s", (parking.group,))
    parked = resident(system, "consumer", 1, PREFETCH, "parked")
    yield line("parked key", (parked - idle) / COUNT, Figures.process_parked_key)
    fill(system, AHEAD)
    ahead = resident(system, "consumer", 1, AHEAD, "ahead")
    yield line("message read ahead", (ahead - idle) / AHEAD - len(BODY), Figures.process_record)
    wide = resident(stage.system(fsync="everysec", partitions=MANY), "consumer", 1, PREFETCH, "wide")
    yield line("partition of a consumer", (wide - idle) / (MANY - FEW), Figures.process_partition)


def of_relays(stage: Stage) -> Iterator[Line]:
    """Yield lines of a relay, its partitions and LPs, and of rows that wait."""
    system = stage.system(fsync="everysec", partitions=FEW)
    idle = resident(system, "relay", 0)
    yield line("relay", idle, Figures.relay_bytes)
    publish(system, ["bench"], KEYS, BACKLOG, BODY)
    busy = resident(system, "relay", BACKLOG)
    yield line("relay out of a backlog", busy, Figures.busy_relay_bytes)
    wide_system = stage.system(fsync="everysec", partitions=MANY)
    publish(wide_system, ["bench"], keys_of(LP_COUNT), LP_COUNT, b"")
    wide = resident(wide_system, "relay", LP_COUNT)
    system = stage.system(fsync="everysec")
    publish(system, ["bench"], keys_of(LP_COUNT), LP_COUNT, b"")
    one_topic = resident(system, "relay", LP_COUNT)
    yield line("partition of a relay", (wide - one_topic) / (MANY - 1), Figures.relay_partition)
    system = stage.system(fsync="everysec")
    names = [topic_name(number) for number in range(TOPICS)]
    for name in names[1:]:
        create_topic(system.runtime, name, partitions=1)
    publish(system, names, keys_of(LP_COUNT), LP_COUNT, b"")
    topics = resident(system, "relay", TOPICS * LP_COUNT)
    yield line("LP of a relay", (topics - one_topic) / (TOPICS - 1) / LP_COUNT, Figures.relay_lp)


def of_producers(stage: Stage) -> Iterator[Line]:
    """Yield lines of a producer, its partitions and LPs, and of messages that wait."""
    system = stage.system(fsync="everysec")
    for number in range(1, TOPICS):
        create_topic(system.runtime, topic_name(number), partitions=1)
    create_topic(system.runtime, "full", partitions=FEW, backlog_limit=1)
    idle = resident(system, "producer", 1, 0, 1)
    yield line("producer", idle, Figures.producer_bytes)
    one_topic, topics = (resident(system, "producer", LP_COUNT, 0, count) for count in (1, TOPICS))
    yield line("LP of a producer", (topics - one_topic) / (TOPICS - 1) / LP_COUNT, Figures.producer_lp)
    pending = resident(system, "producer", 1, PENDING, 1)
    yield line("message that waits in a producer", (pending - idle) / PENDING - len(BODY), Figures.pending_send)
    wide = resident(stage.system(fsync="everysec", partitions=MANY), "producer", LP_COUNT, 0, 1)
    yield line("partition of a producer", (wide - one_topic) / (MANY - 1), Figures.producer_partition)


def publish(system: System, topics: Sequence[str], keys: Sequence[str], count: int, body: bytes) -> None:
    """Publish messages of the keys in turn to each topic."""
    chosen = [keys[number % len(keys)] for number in range(count)]
    with psycopg.connect(system.dsn, autocommit=True) as session:
        for topic in topics:
            for first in range(0, count, COUNT):
                some = chosen[first : first + COUNT]
                session.execute(
                    "SELECT mqlayer_app.publish_many_v1(%s, %s, %s)", ([topic] * len(some), some, [body] * len(some))
                )
