"""The control plane of a large system on one Postgres: topics, partitions, groups, nodes, members."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, Final

from bench.console import browser_here, measure
from bench.lease_cost import alone
from bench.member_process import topic_name
from bench.members import SECONDS, Crews, Size, connections, crews_of, last_lease
from bench.registry import Line, bench, note
from bench.stage import Stage, System
from mqlayer.doctor import diagnose
from mqlayer.groups import GroupSettings, ensure_group
from mqlayer.groups.rebalance import rebalance_groups
from mqlayer.inspect.group_status import group_statuses
from mqlayer.routes import apply_change, planned_split
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.topics import create_topic

NODES: Final = int(os.environ.get("BENCH_NODES", "3"))
TOPICS: Final = int(os.environ.get("BENCH_TOPICS", "4"))
PARTITIONS: Final = int(os.environ.get("BENCH_PARTITIONS", "16"))
"""Of each topic."""
GROUPS: Final = int(os.environ.get("BENCH_GROUPS", "4"))
MEMBERS: Final = int(os.environ.get("BENCH_MEMBERS", "24"))
PROCESSES: Final = int(os.environ.get("BENCH_PROCESSES", "2"))
PAGES: Final[Mapping[str, str]] = {
    "overview": "/",
    "topics": "/topics",
    "topic": "/topics/bench",
    "groups": "/groups",
    "group": "/groups/bench/g0",
    "nodes": "/nodes",
    "problems": "/problems",
}
LOADS: Final = 5
"""Of each page."""


@bench("control_plane")
def control_plane(stage: Stage) -> Iterator[Line]:
    """A system of many topics, partitions, groups, nodes and members that only beat, on one Postgres: heartbeats,
    statements and bytes by the second, Postgres's CPU, p99 of a heartbeat, connections; then seconds until all
    partitions go on after one member left, and after a third vanished and their leases ran out; of a split of a topic
    with all groups, of `group lag`, of `doctor`; pages of the console. There is nothing to compare with.

    `BENCH_TOPICS`, `BENCH_PARTITIONS` (of a topic), `BENCH_GROUPS`, `BENCH_NODES`, `BENCH_MEMBERS`, `BENCH_PROCESSES`,
    `BENCH_SECONDS`, `BENCH_LEASE_S`, `BENCH_CONNECTIONS` (of Postgres) change the size. The long form is 100, 100, 50,
    100, 1000, 4."""
    system = stage.system(partitions=PARTITIONS, nodes=NODES)
    topics = partial(create_topics, system)
    yield timed("create a topic", topics, times=TOPICS - 1 or 1)
    size = Size(MEMBERS, PROCESSES, GROUPS, PARTITIONS * GROUPS, TOPICS)
    with crews_of(system, size) as crews:
        yield from beating(system, crews, size)
        yield from looked_at(system)
        yield from changed(system)


def create_topics(system: System) -> None:
    """Create all topics but the first."""
    for number in range(1, TOPICS):
        create_topic(system.runtime, topic_name(number), partitions=PARTITIONS)


def beating(system: System, crews: Crews, size: Size) -> Iterator[Line]:
    """Yield what members cost at rest, and how soon partitions go on after some of them are gone."""
    began = time.monotonic()
    crews.all(f"join {size.members // size.processes}")
    yield alone("control_plane[join all]", crews.settled_after_s(began), "s")
    crews.counted(3.0)
    yield from crews.counted(SECONDS).lines("at rest", "control_plane")
    yield alone("control_plane[connections]", connections(system), "connections")
    began = time.monotonic()
    crews.first("leave 1")
    yield alone("control_plane[one left]", crews.settled_after_s(began), "s")
    third = size.members // size.processes // 3
    crews.all(f"vanish {third}")
    ended = last_lease(system, third * size.processes)
    yield alone("control_plane[a third vanished]", crews.settled_after_s(ended), "s")


def looked_at(system: System) -> Iterator[Line]:
    """Yield how long looks at the system take, while members beat."""
    yield timed("group lag", partial(group_statuses, system.runtime, "bench", "g0"))
    yield timed("group lag, all groups", partial(group_statuses, system.runtime))
    yield timed("doctor", partial(diagnose, system.settings))
    yield timed("scan for groups without members", partial(rebalance_groups, system.database))
    with browser_here(system.settings) as browser:
        for name, path in PAGES.items():
            p95_ms, size = measure(browser, path, LOADS)
            note(f"  {name}: {p95_ms:.0f} ms, {size:,} bytes")
            yield alone(f"control_plane[console, {name}]", p95_ms, "ms p95")


def changed(system: System) -> Iterator[Line]:
    """Yield how long a split takes of a topic that so many more groups have."""
    with closing(RouteCache(system.database)) as routes:
        for number in range(GROUPS):
            ensure_group(system.runtime, routes, topic="bench", name=f"more{number}", settings=GroupSettings())
    partition = system.route.ranges[0].partition
    yield timed("split", lambda: apply_change(system.runtime, planned_split(system.runtime, "bench", partition)))


def timed(name: str, work: Callable[[], Any], *, times: int = 1) -> Line:
    """Carry out a step; return a line of it in s, by the time."""
    began = time.monotonic()
    work()
    line = alone(f"control_plane[{name}]", (time.monotonic() - began) / times, "s")
    note(f"  {name}: {line.value} s")
    return line
