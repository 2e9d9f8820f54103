"""One program on a Redis Cluster of three shards, against the same on one Redis: both durable, with six partitions."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench.consume import ours as consumed
from bench.registry import Line, bench, compared, frozen_heap, in_turn
from bench.relay import run_relay
from bench.stage import BODY, KEYS, Stage, System
from mqlayer.producing import Message, Producer
from tests.fixtures.clusters import cluster_in

PARTITIONS = 6
MESSAGES = 50_000
ROUNDS = 3


@bench("cluster")
def cluster(stage: Stage) -> Iterator[Line]:
    """`publish_batch`, `consume` and `relay`, messages per second of one process."""
    with ExitStack() as cleanup, frozen_heap():
        directory = tempfile.mkdtemp(prefix="mqlayer-bench-")
        cleanup.callback(shutil.rmtree, directory, ignore_errors=True)
        shards = cleanup.enter_context(cluster_in(Path(directory), replicas=0, timeout_ms=5_000))
        systems = {
            "one node": stage.system(partitions=PARTITIONS),
            "three shards": stage.system(partitions=PARTITIONS, url=shards.url),
        }
        works: dict[str, Callable[[System], float]] = {"publish_batch": publish, "consume": consume, "relay": run_relay}
        for name, work in works.items():
            figures = in_turn(ROUNDS, {place: partial(work, system) for place, system in systems.items()})
            yield compared(f"cluster_{name}", figures["three shards"], figures["one node"], unit="msg/s", target=None)


def publish(system: System) -> float:
    """Publish in batches."""
    with Producer(system.settings, name="bench") as producer:
        producer.send("bench", key=KEYS[0], body=BODY)
        began = time.perf_counter()
        producer.send_many("bench", [Message(KEYS[number % 1_000], BODY) for number in range(MESSAGES)])
        return MESSAGES / (time.perf_counter() - began)


def consume(system: System) -> float:
    """Consume some of the published messages."""
    return consumed(system, MESSAGES)
