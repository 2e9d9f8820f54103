"""Ordered pop against the consumption of an owner, of the same records in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial

import mqlayer
from bench.consume import new_group
from bench.consume import ours as exclusive
from bench.fill import fill
from bench.registry import Line, bench, compared, in_turn
from bench.stage import Stage, System
from mqlayer.groups.group import Scope

MESSAGES = 40_000
ROUNDS = 3
BATCHES = (32, 500)
SCOPES: tuple[Scope, ...] = ("partition", "key")


@bench("pop")
def pop(stage: Stage) -> Iterator[Line]:
    """Messages per second of one receiver over one partition, a batch at a time and acknowledged before the next, or
    with the request for it ("one call"). The baseline is a member that owns the partition: it reads ahead."""
    system = stage.system(fsync="always")
    fill(system, MESSAGES)
    contestants = {f"{scope}, {size}": partial(ours, system, scope, size) for scope in SCOPES for size in BATCHES}
    contestants |= {f"key, {size}, one call": partial(in_one_call, system, size) for size in BATCHES}
    contestants |= {f"key, {size}, asyncio": partial(ours_async, system, size) for size in BATCHES}
    figures = in_turn(ROUNDS, {"owner": partial(exclusive, system, MESSAGES), **contestants})
    for name in contestants:
        yield compared(f"pop[{name}]", figures[name], figures["owner"], unit="msg/s", target=None)


def ours(system: System, scope: Scope, size: int) -> float:
    """Receive and acknowledge everything."""
    with mqlayer.Receiver("bench", group=new_group(), settings=system.settings, scope=scope) as receiver:
        began, seen = time.perf_counter(), 0
        while seen < MESSAGES:
            batch = receiver.receive(size)
            receiver.ack(batch)
            seen += len(batch)
        return seen / (time.perf_counter() - began)


def in_one_call(system: System, size: int) -> float:
    """As `ours`, each batch acknowledged with the next request."""
    with mqlayer.Receiver("bench", group=new_group(), settings=system.settings) as receiver:
        began, seen = time.perf_counter(), 0
        batch: list[mqlayer.PopMessage] = []
        while seen < MESSAGES:
            batch = receiver.receive(size, ack=batch)
            seen += len(batch)
        receiver.ack(batch)
        return seen / (time.perf_counter() - began)


def ours_async(system: System, size: int) -> float:
    """As `ours`, by an AsyncReceiver."""

    async def run() -> float:
        async with mqlayer.AsyncReceiver("bench", group=new_group(), settings=system.settings) as receiver:
            began, seen = time.perf_counter(), 0
            while seen < MESSAGES:
                batch = await receiver.receive(size)
                await receiver.ack(batch)
                seen += len(batch)
            return seen / (time.perf_counter() - began)

    return asyncio.run(run())
