"""The cost of metrics: consuming, publishing and relaying with metrics on, against the same without, in one run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from bench.consume import MESSAGES, ours
from bench.fill import fill
from bench.publish import MANY, our_batches, rate
from bench.registry import Line, bench, compared, in_turn
from bench.relay import PARTITIONS, run_relay
from bench.stage import FSYNCS, Stage, System, line_name
from mqlayer.metrics import metrics_page
from mqlayer.producing import Producer

ROUNDS = 9
"""A small difference: more rounds to tell."""
RELAY_ROUNDS = 5


@bench("metrics")
def metrics(stage: Stage) -> Iterator[Line]:
    """Messages per second; the page is not read meanwhile."""
    gc.collect()
    gc.freeze()
    try:
        for fsync in FSYNCS:
            system = stage.system(fsync=fsync)
            counted = with_metrics(system)
            fill(system, MESSAGES)
            contestants = {"off": partial(ours, system), "on": partial(ours, counted)}
            figures = in_turn(ROUNDS, contestants)
            name = line_name("metrics_consume", fsync)
            yield compared(name, figures["on"], figures["off"], unit="msg/s", target=0.97)
            yield publishing(stage.system(fsync=fsync), line_name("metrics_publish_batch", fsync))
            yield relaying(stage.system(fsync=fsync, partitions=PARTITIONS), line_name("metrics_relay", fsync))
    finally:
        gc.unfreeze()


def publishing(system: System, name: str) -> Line:
    """Publish in batches."""
    counted = with_metrics(system)
    with Producer(system.settings, name="off") as off, Producer(counted.settings, name="on") as on:
        contestants = {
            "off": partial(rate, system, MANY, partial(our_batches, off)),
            "on": partial(rate, system, MANY, partial(our_batches, on)),
        }
        figures = in_turn(ROUNDS, contestants)
    return compared(name, figures["on"], figures["off"], unit="msg/s", target=0.97)


def relaying(system: System, name: str) -> Line:
    """Empty an outbox."""
    contestants = {"off": partial(run_relay, system), "on": partial(run_relay, with_metrics(system))}
    figures = in_turn(RELAY_ROUNDS, contestants)
    return compared(name, figures["on"], figures["off"], unit="msg/s", target=0.97)


def with_metrics(system: System) -> System:
    """Return the same system, for parts that record metrics."""
    settings = system.settings.model_copy(update={"metrics": True})
    metrics_page(settings)
    return replace(system, runtime=replace(system.runtime, settings=settings))
