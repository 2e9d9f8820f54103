"""Route changes under load, and what a look at the route costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from bench.registry import Line, bench, compared, in_turn, note
from bench.stage import BATCH, BODY, Stage, System
from mqlayer.domain.routing import Route, lp_of
from mqlayer.producing import Producer
from mqlayer.producing.engine import open_engine
from mqlayer.producing.message import lp_and_key
from mqlayer.producing.send_queues import TopicQueues
from mqlayer.routes import apply_change, planned_merge, planned_move, planned_split
from mqlayer.runtime.route_cache import load_route

RATE_PER_S: Final = 1_000
SECONDS: Final = 8.0
LIMIT_MS: Final = 1_000.0
"""The longest gap that a change may make; 100 ms is aimed at."""
LOOKUPS: Final = 200_000
LIMIT_US: Final = 1.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run: the longest time without an acknowledgement, and how long an acknowledgement took, in ms."""

    longest_gap_ms: float
    p99_ms: float


@bench("route_change")
def route_change(stage: Stage) -> Iterator[Line]:
    """Longest publish gap in ms at an open-loop 1,000 messages/s to one partition while it is split, its halves are
    moved to another node and merged again, several times; beside the same without a change. The target is in ms."""
    system = stage.system(partitions=4, nodes=2)
    calm = measure(system, lambda _: None)
    note(f"  without a change: {calm}")
    counts: list[int] = []
    changed = measure(system, lambda stopping: counts.append(change_all_the_time(system, stopping)))
    note(f"  {counts[0]} changes: {changed}")
    yield compared("route_change", changed.longest_gap_ms, calm.longest_gap_ms, unit="ms longest gap", target=LIMIT_MS)
    yield compared("route_change[p99]", changed.p99_ms, calm.p99_ms, unit="ms p99", target=None)


@bench("route_lookup")
def route_lookup(stage: Stage) -> Iterator[Line]:
    """Microseconds per message to find LP and partition of a batch of 500 keys by what producers call, seen before or
    not; the baseline is one dict lookup each. The target is in microseconds."""
    with topic_of_a_producer(stage.system(partitions=64)) as topic:
        table = topic.table
        for name, keys, limit in (("route_lookup", known_keys(), LIMIT_US), ("route_lookup[new keys]", None, None)):
            runs: dict[str, Callable[[], float]] = {
                "raw": lambda keys=keys: look_up(keys or new_keys(), dict.fromkeys(keys or (), table[0]).get),  # type: ignore[misc]
                "ours": lambda keys=keys: look_up(keys or new_keys(), lambda key: table[lp_and_key(key)[0]]),  # type: ignore[misc]
            }
            figures = in_turn(5, runs)
            yield compared(name, figures["ours"], figures["raw"], unit="us per message", target=limit)


@contextmanager
def topic_of_a_producer(system: System) -> Iterator[TopicQueues]:
    """Lend the topic as a producer has it after its first message: the route in force, as a partition for each LP."""
    engine = open_engine(system.settings, "bench", None)
    try:
        yield engine.topic("bench")
    finally:
        engine.end(0)


def measure(system: System, work: Callable[[threading.Event], object]) -> Figures:
    """Publish at the rate while some work goes on beside it."""
    keys = [key for number in range(4_000) if lp_of((key := f"hot-{number}").encode()) < 256]
    acknowledged: list[tuple[int, int]] = []
    stopping = threading.Event()

    def note_time(sent_ns: int) -> Callable[[Future[Any]], None]:
        def noted(future: Future[Any]) -> None:
            future.result()
            acknowledged.append((sent_ns, time.monotonic_ns()))

        return noted

    with Producer(system.settings, name="bench") as producer:
        producer.send("bench", key=keys[0], body=BODY)
        beside = threading.Thread(target=work, args=(stopping,))
        beside.start()
        began, count = time.monotonic(), int(SECONDS * RATE_PER_S)
        for number in range(count):
            due = began + number / RATE_PER_S
            time.sleep(max(0.0, due - time.monotonic()))
            future = producer.send_async("bench", key=keys[number % len(keys)], body=BODY)
            future.add_done_callback(note_time(int(due * 1e9)))
        stopping.set()
        beside.join()
        producer.flush()
    return figures_of(acknowledged)


def figures_of(acknowledged: Sequence[tuple[int, int]]) -> Figures:
    """Return the figures of (due, acknowledged) times in ns."""
    times = sorted(at for _, at in acknowledged)
    gaps = [after - before for before, after in pairwise(times)]
    waits = sorted(at - due for due, at in acknowledged)
    return Figures(round(max(gaps) / 1e6, 2), round(waits[int(len(waits) * 0.99)] / 1e6, 2))


def change_all_the_time(system: System, stopping: threading.Event) -> int:
    """Split the hot partition, move both halves to the other node, merge them there, and so on; return how often."""
    count = 0
    for step in (step for _ in range(1_000) for step in (split_hot, move_hot, move_second, merge_hot)):
        if stopping.wait(0.25):
            break
        step(system, load_route(system.database, "bench"))
        count += 1
    return count


def split_hot(system: System, route: Route) -> None:
    """Split the first partition in the middle of its load."""
    apply_change(system.runtime, planned_split(system.runtime, "bench", route.ranges[0].partition))


def move_hot(system: System, route: Route) -> None:
    """Move the first partition."""
    apply_change(system.runtime, planned_move(system.database, "bench", route.ranges[0].partition))


def move_second(system: System, route: Route) -> None:
    """Move the second partition."""
    apply_change(system.runtime, planned_move(system.database, "bench", route.ranges[1].partition))


def merge_hot(system: System, route: Route) -> None:
    """Merge the first two partitions."""
    pair = [r.partition for r in route.ranges[:2]]
    apply_change(system.runtime, planned_merge(system.database, "bench", pair))


def known_keys() -> list[str]:
    """Return a batch of keys that come again and again."""
    return [f"key-{number}" for number in range(BATCH)]


def new_keys() -> list[str]:
    """Return a batch of keys that nobody saw before."""
    stamp = time.monotonic_ns()
    return [f"key-{stamp}-{number}" for number in range(BATCH)]


def look_up(keys: Sequence[str], find: Callable[[str], object]) -> float:
    """Return microseconds per key, over many batches of the same kind."""
    batches = LOOKUPS // len(keys)
    elapsed = 0.0
    fresh = keys[0].count("-") > 1
    for _ in range(batches):
        batch = new_keys() if fresh else keys
        began = time.perf_counter()
        for key in batch:
            find(key)
        elapsed += time.perf_counter() - began
    return elapsed / (batches * len(keys)) * 1e6
