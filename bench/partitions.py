"""What partitions cost a member that consumes a backlog: as many messages over 1 to 512 partitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from bench.consume import ours
from bench.fill import fill
from bench.registry import Line, bench, compared, frozen_heap, in_turn
from bench.stage import FSYNCS, Stage, line_name
from mqlayer.topics import create_topic

PARTITIONS: Final = (8, 64, 512)
MESSAGES: Final = 100_000
KEYS: Final = tuple(f"key-{number}" for number in range(5_000))
ROUNDS: Final = 3


@bench("consume_partitions")
def consume_partitions(stage: Stage) -> Iterator[Line]:
    """Messages per second of one process over 8, 64 and 512 partitions, against the same over one."""
    with frozen_heap():
        for fsync in FSYNCS:
            system = stage.system(fsync=fsync)
            runs = {}
            for count in (1, *PARTITIONS):
                name = f"over{count}"
                topic = replace(system, route=create_topic(system.runtime, name, partitions=count))
                fill(topic, MESSAGES, keys=KEYS)
                runs[name] = partial(ours, topic, MESSAGES, topic=name)
            figures = in_turn(ROUNDS, runs)
            for count in PARTITIONS:
                name = line_name(f"consume_partitions[{count}]", fsync)
                yield compared(name, figures[f"over{count}"], figures["over1"], unit="msg/s", target=0.5)
