"""A member of a shared group with a no-op handler and acks, against XREADGROUP and XACK of the same batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial

import mqlayer
from bench.consume import new_group, raw
from bench.fill import fill
from bench.registry import Line, bench, compared, frozen_heap, in_turn
from bench.stage import FSYNCS, Stage, System, line_name
from mqlayer.consuming.shared.member import SharedMember

MESSAGES = 300_000
ROUNDS = 3


@bench("shared")
def shared(stage: Stage) -> Iterator[Line]:
    """Messages per second of one process over one partition, checks, heartbeats and retry looks included."""
    with frozen_heap():
        for fsync in FSYNCS:
            system = stage.system(fsync=fsync)
            fill(system, MESSAGES)
            figures = in_turn(ROUNDS, {"raw": partial(raw, system), "ours": partial(ours, system)})
            yield compared(line_name("shared", fsync), figures["ours"], figures["raw"], unit="msg/s", target=0.7)


def ours(system: System) -> float:
    """Consume everything with a member; the clock stops when the last message is settled on the node."""
    app, group = mqlayer.App(system.settings), new_group()
    seen = 0
    all_seen = threading.Event()

    @app.consumer("bench", group=group, mode="shared")
    def handle(_body: bytes) -> None:
        nonlocal seen
        seen += 1
        if seen >= MESSAGES:
            all_seen.set()

    began = time.perf_counter()
    app.start()
    member = app.members[0]
    assert isinstance(member, SharedMember)
    all_seen.wait(120)
    while member.stats.settled < MESSAGES:
        time.sleep(0.001)
    elapsed = time.perf_counter() - began
    app.stop()
    return MESSAGES / elapsed
