"""Keys that fail for ever: what others pay for them, in time and in memory of the node."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final

import mqlayer
from bench.consume import new_group
from bench.fill import fill
from bench.latency import COUNT, await_line, drive, process
from bench.registry import Line, bench, compared, frozen_heap, in_turn, note
from bench.stage import KEYS, Stage, System
from mqlayer.maintenance import trim_pass
from mqlayer.producing import Producer

SHARES: Final[Mapping[str, int]] = {"0 %": 0, "1 %": len(KEYS) // 100, "10 %": len(KEYS) // 10}
"""How many of the keys fail."""
MESSAGES: Final = 300_000
ROUNDS: Final = 5
BACKOFF_S: Final = (0.1, 3600.0)
"""Once in place, then parked: what comes after that is parked behind it."""
SHARE_KEPT: Final = 0.9
HOT_SHARE: Final = 10
"""Every so many messages are of the key that is parked."""
MEMORY_MESSAGES: Final = int(os.environ.get("BENCH_MESSAGES", "1000000"))
STRETCH: Final = 50_000
PATIENCE_S: Final = 120.0

logging.getLogger("mqlayer").addHandler(logging.NullHandler())


@bench("failing_keys")
def failing_keys(stage: Stage) -> Iterator[Line]:
    """Messages per second of the keys that don't fail out of a backlog, and their p99 at 1,000 messages per second,
    with 0, 1 and 10 % of 1,000 keys failing for ever; ratios are to 0 % of the same run."""
    with frozen_heap():
        system = stage.system(partitions=4)
        fill(system, MESSAGES)
        rates = in_turn(ROUNDS, {name: partial(healthy_rate, system, count) for name, count in SHARES.items()})
    late = in_turn(ROUNDS, {name: partial(late_p99_ms, stage, count) for name, count in SHARES.items()})
    for name in list(SHARES)[1:]:
        target = SHARE_KEPT if name == "1 %" else None
        yield compared(f"failing_keys[{name}]", rates[name], rates["0 %"], unit="msg/s", target=target)
        yield compared(f"failing_keys[{name}, p99]", late[name], late["0 %"], unit="ms p99", target=None)


def healthy_rate(system: System, failing: int, *, messages: int = MESSAGES) -> float:
    """Return how many messages of healthy keys one process handles per second, the first so many keys failing."""
    app, broken, done = mqlayer.App(system.settings), frozenset(KEYS[:failing]), threading.Event()
    left = messages - sum(KEYS[number % len(KEYS)] in broken for number in range(messages))
    ended = 0.0

    @app.consumer("bench", group=new_group(), start="earliest", backoff_s=BACKOFF_S)
    def handle(_body: bytes, ctx: mqlayer.Context) -> None:
        nonlocal left, ended
        if ctx.key in broken:
            raise ValueError("for ever")
        left -= 1
        if not left:
            ended = time.perf_counter()
            done.set()

    began = time.perf_counter()
    app.start()
    if not done.wait(PATIENCE_S):
        raise RuntimeError(f"{left} messages of healthy keys were not handled")
    app.stop()
    return (messages - messages * failing // len(KEYS)) / (ended - began)


def late_p99_ms(stage: Stage, failing: int) -> float:
    """Return the p99 of the healthy keys at a steady rate, the first so many keys failing."""
    system, healthy = stage.system(partitions=4), COUNT - COUNT * failing // len(KEYS)
    with (
        Producer(system.settings, name="bench") as producer,
        process(system, "-m", "bench.actors", "member", new_group(), str(healthy), str(failing)) as taker,
    ):
        await_line(taker)
        drive([lambda key, body: producer.send_oneway("bench", key=key, body=body)])
        return float(json.loads(await_line(taker))["p99_ms"])


@bench("parked_memory")
def parked_memory(stage: Stage) -> Iterator[Line]:
    """Memory of the node in MB after a million messages, trimmed as they are settled, a tenth of them of one key that
    is parked from its first message on; against the same without a failure: flat is a ratio of 1."""
    figures = {
        parked: memory_mb(stage.system(fsync="everysec", partitions=4), MEMORY_MESSAGES, parked=parked)
        for parked in (False, True)
    }
    yield compared("parked_memory", figures[True], figures[False], unit="MB", target=1.0)


def memory_mb(system: System, messages: int, *, parked: bool, stretch: int = STRETCH) -> float:
    """Return what the node takes in the end."""
    app, keys = mqlayer.App(system.settings), ["hot", *KEYS[: HOT_SHARE - 1]]

    @app.consumer("bench", group=new_group(), start="earliest", backoff_s=(3600.0,))
    def handle(_body: bytes, ctx: mqlayer.Context) -> None:
        if parked and ctx.key == "hot":
            raise ValueError("for ever")

    app.start()
    client = system.client()
    for start in range(0, messages, stretch):
        fill(system, min(stretch, messages - start), keys=keys, start=start)
        end, until = min(messages, start + stretch), time.monotonic() + PATIENCE_S
        while app.members[0].stats.settled < end:
            if time.monotonic() > until:
                raise RuntimeError(f"{app.members[0].stats} of {end} messages")
            time.sleep(0.01)
        trim_pass(system.runtime)
    stats = app.members[0].stats
    app.stop()
    figure = int(client.info("memory")["used_memory"]) / 1e6
    note(f"  {'parked' if parked else 'healthy'}: {figure:.1f} MB, {stats.parked} messages parked")
    return figure
