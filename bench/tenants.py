"""One tenant's flood: how long another tenant's messages wait behind it, and what classes of keys cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import mqlayer
from bench.consume import new_group, ours
from bench.fill import fill
from bench.registry import Line, bench, compared, frozen_heap, in_turn
from bench.stage import Stage, System
from mqlayer.groups.admin import set_group

FLOOD: Final = 20_000
HANDLER_S: Final = 0.001
FEW: Final = 10
RECEIVED: Final = 50
RECEIVED_FLOOD: Final = 5_000
"""Fewer: one receiver waits for all of them where keys have no classes."""
MESSAGES: Final = 300_000
ROUNDS: Final = 3
BY_PREFIX: Final = "prefix:/"
RULES: Final[dict[str, dict[str, Any]]] = {"without": {}, "with": {"key_class": BY_PREFIX}}
MODES: Final[dict[str, dict[str, Any]]] = {"": {}, "[shared]": {"mode": "shared"}}


@bench("tenant_flood")
def tenant_flood(stage: Stage) -> Iterator[Line]:
    """Time from the start to the last of ten messages of a tenant behind 20,000 of another one, with classes of keys
    against without; handlers wait for a millisecond; the same in a shared group, and with a receiver behind 5,000. Then
    the rate of handlers that do nothing, all of it read twice: three tenants in turn, and one alone."""
    with frozen_heap():
        system = flooded(stage, FLOOD)
        for title, mode in MODES.items():
            waits = in_turn(ROUNDS, {kind: partial(last_ms, system, **mode, **said) for kind, said in RULES.items()})
            yield compared(f"tenant_flood{title}", waits["with"], waits["without"], unit="ms", target=None)
        system = flooded(stage, RECEIVED_FLOOD)
        waits = in_turn(ROUNDS, {kind: partial(last_received_ms, system, **said) for kind, said in RULES.items()})
        yield compared("tenant_flood[pop]", waits["with"], waits["without"], unit="ms", target=None)
        for name, tenants in {"three tenants": "abc", "one tenant": "a"}.items():
            system = stage.system(partitions=2)
            fill(system, MESSAGES, keys=[f"{tenants[n % len(tenants)]}/{n}" for n in range(999)])
            for title, mode in MODES.items():
                rates = in_turn(ROUNDS, {kind: partial(ours, system, **mode, **said) for kind, said in RULES.items()})
                called = f"tenant_flood[{name}]{title}"
                yield compared(called, rates["with"], rates["without"], unit="msg/s", target=None)


def flooded(stage: Stage, count: int) -> System:
    """Return a system with so many messages of one tenant, and few of another one behind them."""
    system = stage.system(partitions=2)
    fill(system, count + FEW, keys=[f"big/{n}" for n in range(count)] + [f"small/{n}" for n in range(FEW)])
    return system


def last_received_ms(system: System, **rules: Any) -> float:
    """Return when a receiver that is given 50 messages at a time handled them, in ms."""
    group, left = new_group(), FEW
    with mqlayer.Receiver("bench", group=group, settings=system.settings):
        if rules:
            set_group(system.runtime, "bench", group, **rules)
    with mqlayer.Receiver("bench", group=group, settings=system.settings) as receiver:
        began = time.perf_counter()
        while left:
            batch = receiver.receive(RECEIVED, wait_s=5.0)
            for message in batch:
                time.sleep(HANDLER_S)
                left -= (message.key or "").startswith("small/")
            receiver.ack(batch)
        return 1000 * (time.perf_counter() - began)


def last_ms(system: System, **rules: Any) -> float:
    """Return when the small tenant's last message was handled, in ms from the start of a member."""
    app, left, done = mqlayer.App(system.settings), FEW, threading.Event()

    @app.consumer("bench", group=new_group(), **rules)
    def handle(_body: bytes, ctx: mqlayer.Context) -> None:
        nonlocal left
        time.sleep(HANDLER_S)
        if (ctx.key or "").startswith("small/"):
            left -= 1
            if not left:
                done.set()

    began = time.perf_counter()
    app.start()
    done.wait(120)
    elapsed = time.perf_counter() - began
    app.stop()
    return 1000 * elapsed
