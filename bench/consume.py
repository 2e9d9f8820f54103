"""The whole consumer with a no-op handler and acks, against XREADGROUP and XACK of the same records in one process."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import mqlayer
from bench.fill import fill
from bench.registry import Line, bench, compared, frozen_heap, in_turn
from bench.stage import BATCH, FSYNCS, Stage, System, line_name
from mqlayer.redis.keys import partition_keys
from mqlayer.topics import set_archived

MESSAGES = 300_000
ROUNDS = 5
ARCHIVED_ROUNDS = 9
"""A small difference: more rounds to tell."""


@bench("consume")
def consume(stage: Stage) -> Iterator[Line]:
    """Messages per second of one process over one partition, heartbeats and lock checks included."""
    with frozen_heap():
        for fsync in FSYNCS:
            system = stage.system(fsync=fsync)
            fill(system, MESSAGES)
            figures = in_turn(ROUNDS, {"raw": partial(raw, system), "ours": partial(ours, system)})
            yield compared(line_name("consume", fsync), figures["ours"], figures["raw"], unit="msg/s", target=1.0)


@bench("consume_archived")
def consume_archived(stage: Stage) -> Iterator[Line]:
    """The same of an archived topic, whose consumers tell what becomes of messages, against one that is not."""
    with frozen_heap():
        for fsync in FSYNCS:
            system = stage.system(fsync=fsync)
            fill(system, MESSAGES)
            figures = in_turn(
                ARCHIVED_ROUNDS, {"not": partial(told, system, False), "told": partial(told, system, True)}
            )
            yield compared(
                line_name("consume_archived", fsync), figures["told"], figures["not"], unit="msg/s", target=0.97
            )


@bench("consume_breaker")
def consume_breaker(stage: Stage) -> Iterator[Line]:
    """The same of a group with a circuit breaker, against one without."""
    with frozen_heap():
        system = stage.system(fsync=FSYNCS[0])
        fill(system, MESSAGES)
        kinds = {"without": partial(ours, system), "with": partial(ours, system, breaker_share=0.5)}
        figures = in_turn(ARCHIVED_ROUNDS, kinds)
        yield compared(
            line_name("consume_breaker", FSYNCS[0]), figures["with"], figures["without"], unit="msg/s", target=0.98
        )


def told(system: System, archived: bool) -> float:
    """Consume everything of a topic that is archived, or not."""
    set_archived(system.runtime, "bench", archived=archived)
    return ours(system)


def raw(system: System) -> float:
    """Read and acknowledge everything with a native consumer group."""
    group = new_group()
    client, log = system.client(), partition_keys(system.settings.key_prefix, system.route.ranges[0].partition).log
    client.xgroup_create(log, group, "0")
    began, seen = time.perf_counter(), 0
    while seen < MESSAGES:
        reply: Any = client.xreadgroup(group, "c", {log: ">"}, count=BATCH)
        ids = [entry_id for entry_id, _ in reply[0][1]]
        client.xack(log, group, *ids)
        seen += len(ids)
    elapsed = time.perf_counter() - began
    client.xgroup_destroy(log, group)
    return seen / elapsed


def ours(system: System, messages: int = MESSAGES, *, topic: str = "bench", **rules: Any) -> float:
    """Consume everything with a member; the clock stops when the last message is settled on the node."""
    app, group = mqlayer.App(system.settings), new_group()
    seen = 0
    all_seen = threading.Event()

    @app.consumer(topic, group=group, **rules)
    def handle(_body: bytes) -> None:
        nonlocal seen
        seen += 1
        if seen >= messages:
            all_seen.set()

    began = time.perf_counter()
    app.start()
    member = app.members[0]
    all_seen.wait(120)
    while member.stats.settled < messages:
        time.sleep(0.001)
    elapsed = time.perf_counter() - began
    app.stop()
    return messages / elapsed


def new_group() -> str:
    """Return a name that no group has."""
    return f"g{uuid.uuid4().hex[:8]}"
