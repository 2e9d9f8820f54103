"""The cost of metrics and traces: consuming, publishing and relaying with them on, against the same without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from bench.consume import MESSAGES, ours
from bench.fill import fill
from bench.publish import MANY, our_batches, rate
from bench.registry import Line, bench, compared, frozen_heap, in_turn
from bench.relay import PARTITIONS, run_relay
from bench.stage import FSYNCS, Stage, System, line_name
from bench.traces import traces
from mqlayer.metrics import metrics_page
from mqlayer.producing import Producer

ROUNDS = 5
RELAY_ROUNDS = 3
Run = Callable[[], float]


@bench("metrics")
def metrics(stage: Stage) -> Iterator[Line]:
    """Messages per second; the page is not read meanwhile."""
    with frozen_heap():
        for fsync in FSYNCS:
            system = stage.system(fsync=fsync)
            fill(system, MESSAGES)
            yield both_ways(line_name("metrics_consume", fsync), partial(ours, system), partial(ours, counted(system)))
            yield publishing(stage.system(fsync=fsync), line_name("metrics_publish_batch", fsync))
            system = stage.system(fsync=fsync, partitions=PARTITIONS)
            off, on = partial(run_relay, system), partial(run_relay, counted(system))
            yield both_ways(line_name("metrics_relay", fsync), off, on, rounds=RELAY_ROUNDS)
        yield from traces(stage)


def publishing(system: System, name: str) -> Line:
    """Publish in batches."""
    with Producer(system.settings, name="off") as off, Producer(counted(system).settings, name="on") as on:
        runs = [partial(rate, system, MANY, partial(our_batches, producer)) for producer in (off, on)]
        return both_ways(name, *runs)


def both_ways(name: str, off: Run, on: Run, *, rounds: int = ROUNDS) -> Line:
    """Compare in the orders off, on and on, off: on a busy disk, the first of two is quicker."""
    figures = in_turn(rounds, {"off": off, "on": on, "on, first": on, "off, second": off})
    value, baseline = (figures["on"] + figures["on, first"]) / 2, (figures["off"] + figures["off, second"]) / 2
    return compared(name, value, baseline, unit="msg/s", target=0.97)


def counted(system: System) -> System:
    """Return the same system, for parts that record metrics."""
    settings = system.settings.model_copy(update={"metrics": True})
    metrics_page(settings)
    return replace(system, runtime=replace(system.runtime, settings=settings))
