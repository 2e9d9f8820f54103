"""Memory of a consumer whose handlers never finish, with few and with a million messages waiting."""

from __future__ import annotations

import json
from collections.abc import Iterator

from bench.fill import fill
from bench.latency import await_line, process
from bench.registry import Line, bench, compared, note
from bench.stage import Stage, System

FEW = 10_000
MANY = 1_000_000
SAMPLES = 6


@bench("consumer_memory")
def consumer_memory(stage: Stage) -> Iterator[Line]:
    """Resident memory in MB with a million messages waiting, against ten thousand: flat is a ratio of 1."""
    system = stage.system(partitions=4)
    fill(system, FEW)
    few = resident_mb(system, "few")
    fill(system, MANY - FEW, start=FEW)
    many = resident_mb(system, "many")
    yield compared("consumer_memory", many, few, unit="MB", target=1.0)


def resident_mb(system: System, group: str) -> float:
    """Return the highest figure over some seconds of a consumer that has read as far as it may."""
    with process(system, "-m", "bench.actors", "idle", group) as consumer:
        figures = [float(json.loads(await_line(consumer))["rss_mb"]) for _ in range(SAMPLES)]
        consumer.kill()
    note(f"  {group}: {max(figures):.1f} MB")
    return max(figures)
