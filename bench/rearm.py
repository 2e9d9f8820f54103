"""How long it takes to arm a node again that restarted: partitions with groups, parked keys and sealed parents."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Final

import redis

from bench.registry import Line, bench, note
from bench.stage import Stage, System
from mqlayer.routes import apply_change, planned_split
from mqlayer.runtime.route_cache import load_route
from mqlayer.stack import RedisServer
from mqlayer.topics import rearm_node

PARTITIONS: Final = 100
SPLITS: Final = 10
GROUPS: Final = 3
PARKED_KEYS: Final = 1_000
ROUNDS: Final = 5
LIMIT_MS: Final = 2_000.0


@bench("rearm")
def rearm(stage: Stage) -> Iterator[Line]:
    """Milliseconds to arm a node that restarted: 100 partitions and what 10 splits added, three groups, parked keys.
    Then the same after it lost all that it held, the outbox being empty: partitions, seals and tombstones are made."""
    system = stage.system(partitions=PARTITIONS)
    fill(system)
    server = stage.redis()
    yield line("rearm", statistics.median(arm(system, server) for _ in range(ROUNDS)))
    yield line("rearm[empty node]", statistics.median(arm(system, server, empty=True) for _ in range(ROUNDS)))


def fill(system: System) -> None:
    """Split some partitions, make groups that hold all of them, and park keys."""
    for number in range(SPLITS):
        route = load_route(system.database, "bench")
        apply_change(system.runtime, planned_split(system.runtime, "bench", route.ranges[2 * number].partition))
    with system.database.connection() as connection:
        for number in range(GROUPS):
            connection.execute(
                "INSERT INTO mqlayer.consumer_group (topic_id, name, start, backoff_s) "
                "SELECT topic_id, %s, 'earliest', '{1}' FROM mqlayer.topic WHERE name = 'bench'",
                (f"group-{number}",),
            )
        connection.execute(
            "INSERT INTO mqlayer.assignment (group_id, partition_id, epoch) "
            "SELECT group_id, partition_id, nextval('mqlayer.epoch') FROM mqlayer.consumer_group, mqlayer.partition "
            "WHERE partition.state IN ('open', 'sealed')"
        )
        connection.execute(
            "INSERT INTO mqlayer.parked_key (group_id, lp, name, cause, attempts) "
            "SELECT group_id, n %% 1024, ('key-' || n)::bytea, 'exhausted', 1 "
            "FROM mqlayer.consumer_group, generate_series(1, %s) AS n",
            (PARKED_KEYS,),
        )


def arm(system: System, server: RedisServer, *, empty: bool = False) -> float:
    """Restart the node, arm it; return how long the arming took, in ms."""
    if empty:
        redis.Redis.from_url(server.url).flushall()
    server.restart()
    began = time.perf_counter()
    _, epochs = rearm_node(system.runtime, "n1")
    took_ms = (time.perf_counter() - began) * 1e3
    note(f"  {epochs} epochs: {took_ms:,.0f} ms")
    return took_ms


def line(name: str, value: float) -> Line:
    """Return a line whose target is in ms."""
    return Line(name=name, value=round(value, 1), unit="ms", baseline=None, ratio=None, target=LIMIT_MS)
