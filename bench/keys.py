"""One partition, few and many keys, handlers that take time: how much of a partition is handled side by side.

Beside it runs what one would write by hand: one thread reads a native group, threads with a queue each take the keys by
their hash, what was read is acknowledged when all of it is handled. It keeps the order of a key, and promises nothing
else. Confluent's Parallel Consumer publishes figures of another machine for handlers of 0 to 5 ms at random.
"""

from __future__ import annotations

import asyncio
import queue
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import mqlayer
from bench.consume import new_group
from bench.fill import fill
from bench.registry import Line, bench, compared, frozen_heap, note
from bench.stage import BATCH, Stage, System
from mqlayer.consuming import MemberOptions
from mqlayer.redis.keys import partition_keys

MESSAGES: Final = 10_000
CONCURRENCY: Final = 100
ROUNDS: Final = 3
IN_HAND: Final = 1_000
"""How many messages are read and not acknowledged, by hand."""
LONGEST_S: Final = 1.5
"""A run that the handlers alone would take longer for gets fewer messages: the figures are rates."""
DELAYS_MS: Final[Sequence[tuple[float, float]]] = ((0, 0), (1, 1), (5, 5), (0, 5))
PUBLISHED_S: Final = {1: 26.743, 20: 2.242, 1_000: 2.056}
"""Confluent's Parallel Consumer, by number of keys: seconds for 10,000 messages at concurrency 100 and 0 to 5 ms."""

Wait = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Load:
    """So many messages of so many keys, whose handlers take between so many ms."""

    keys: int
    least_ms: float
    most_ms: float

    @property
    def name(self) -> str:
        """What a line is called."""
        span = f"{self.least_ms:g}" if self.least_ms == self.most_ms else f"{self.least_ms:g}-{self.most_ms:g}"
        return f"{self.keys:,} key{'s' if self.keys > 1 else ''}, {span} ms"

    @property
    def count(self) -> int:
        """How many messages one run handles."""
        alone_s = (self.least_ms + self.most_ms) / 2e3 / min(self.keys, CONCURRENCY)
        return min(MESSAGES, int(LONGEST_S / alone_s)) if alone_s else MESSAGES

    def waits(self) -> Iterator[float]:
        """Return how long each handler takes, in s: the same for all who are compared."""
        dice = random.Random(self.keys)
        return iter([dice.uniform(self.least_ms, self.most_ms) / 1e3 for _ in range(MESSAGES)])


@bench("key_parallel")
def key_parallel(stage: Stage) -> Iterator[Line]:
    """Messages per second of one process over one partition with 1, 20 and 1,000 keys and handlers of 0, 1, 5 and 0 to
    5 ms at concurrency 100, from the first handler to the last ack, against the same by hand; then against what
    Confluent publishes, where the ratio is to another machine."""
    with frozen_heap():
        for keys in PUBLISHED_S:
            system = stage.system()
            fill(system, MESSAGES, keys=[f"key-{number}" for number in range(keys)])
            for delay in DELAYS_MS:
                yield from measure(system, Load(keys, *delay))


def measure(system: System, load: Load) -> Iterator[Line]:
    """Run one load with threads and with coroutines, and by hand."""
    published = load.most_ms > load.least_ms
    runs = {"by hand": partial(by_hand, system, load), "threads": partial(ours, system, load)}
    if published:
        runs["async"] = partial(ours, system, load, in_loop=True)
    figures: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            figures[name].append(run())
    medians = {name: statistics.median(values) for name, values in figures.items()}
    note(f"  {load.name}: " + ", ".join(f"{name} {value:,.0f}" for name, value in medians.items()))
    compare = partial(compared, unit="msg/s")
    yield compare(f"key_parallel[{load.name}]", medians["threads"], medians["by hand"], target=1.0)
    if published:
        theirs, name = MESSAGES / PUBLISHED_S[load.keys], f"key_parallel[{load.name}, "
        # With one key all the time goes by in the handlers.
        target = 1.0 if load.keys > 1 else None
        yield compare(name + "published]", medians["threads"], theirs, target=target)
        # A loop's timers are whole milliseconds, a thread's are not: no target against the ones with threads.
        yield compare(name + "async]", medians["async"], medians["by hand"], target=None)
        yield compare(name + "async, published]", medians["async"], theirs, target=target)


def ours(system: System, load: Load, *, in_loop: bool = False) -> float:
    """Consume with a member of 100 threads, or of 100 coroutines."""
    app, group, waits, began = mqlayer.App(system.settings), new_group(), load.waits(), list[float]()

    def plain(_body: bytes) -> None:
        if not began:
            began.append(time.perf_counter())
        wait_s = next(waits, 0.0)
        if wait_s:
            time.sleep(wait_s)

    async def awaiting(_body: bytes) -> None:
        if not began:
            began.append(time.perf_counter())
        wait_s = next(waits, 0.0)
        if wait_s:
            await asyncio.sleep(wait_s)

    options = MemberOptions(concurrency=CONCURRENCY)
    app.consumer("bench", group=group, options=options)(awaiting if in_loop else plain)
    app.start()
    member = app.members[0]
    while member.stats.settled < load.count:
        time.sleep(0.001)
    rate = member.stats.settled / (time.perf_counter() - began[0])
    app.stop()
    return rate


def by_hand(system: System, load: Load) -> float:
    """Consume with a native group, and threads among which the keys are spread evenly."""
    client, group = system.client(), new_group()
    log = partition_keys(system.settings.key_prefix, system.route.ranges[0].partition).log
    client.xgroup_create(log, group, "0")
    crew = KeyedThreads(load)
    began, read, acked = time.perf_counter(), 0, 0
    while acked < load.count:
        if read - acked <= IN_HAND - BATCH and read < MESSAGES:
            reply: Any = client.xreadgroup(group, "c", {log: ">"}, count=BATCH)
            for entry_id, fields in reply[0][1]:
                crew.give(entry_id, fields[b"k"])
            read += len(reply[0][1])
        ids = crew.handled(min(BATCH // 5, read - acked))
        client.xack(log, group, *ids)
        acked += len(ids)
    elapsed = time.perf_counter() - began
    crew.close()
    client.xgroup_destroy(log, group)
    return acked / elapsed


class KeyedThreads:
    """Threads with a queue each, which handle what is given to them in order."""

    def __init__(self, load: Load) -> None:
        self._waits = load.waits()
        self._queues = [queue.SimpleQueue[bytes | None]() for _ in range(min(CONCURRENCY, load.keys))]
        self._handled = queue.SimpleQueue[bytes]()
        self._closed = False
        self._threads = [threading.Thread(target=self._work, args=(mine,)) for mine in self._queues]
        for thread in self._threads:
            thread.start()

    def give(self, entry_id: bytes, key: bytes) -> None:
        """Have an entry handled, after all earlier ones of its key."""
        self._queues[int(key.removeprefix(b"key-")) % len(self._queues)].put(entry_id)

    def handled(self, least: int) -> list[bytes]:
        """Return what is handled, so many at the least."""
        return [self._handled.get() for _ in range(max(least, self._handled.qsize()))]

    def close(self) -> None:
        """End the threads."""
        self._closed = True
        for mine in self._queues:
            mine.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, mine: queue.SimpleQueue[bytes | None]) -> None:
        while (entry_id := mine.get()) is not None and not self._closed:
            wait_s = next(self._waits, 0.0)
            if wait_s:
                time.sleep(wait_s)
            self._handled.put(entry_id)
