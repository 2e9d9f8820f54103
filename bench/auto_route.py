"""Automatic routes under a load with one hot partition, against routes that stay as they are."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from bench.processes import CONSUME, consumer_group, wait_until
from bench.registry import Line, bench, compared, note
from bench.stage import BODY, Stage, System
from bench.takeover import alone
from mqlayer.autopilot import Times, auto_routes, set_policy
from mqlayer.domain.routing import lp_of
from mqlayer.domain.split_points import balancing_points
from mqlayer.groups import balance_by_rate
from mqlayer.groups.group import GroupSettings, ensure_group
from mqlayer.producing import Producer
from mqlayer.routes import apply_change, planned_split, route_history
from mqlayer.runtime.route_cache import RouteCache, load_route

PARTITIONS: Final = 4
MEMBERS: Final = 4
CONCURRENCY: Final = 4
WAIT_MS: Final = 20
"""So a member handles 200 messages/s at most."""
RATE_PER_S: Final = 500
SECONDS: Final = 48.0
COUNTED_S: Final = 16.0
"""The last part of a run: whatever changes has changed."""
PASS_S: Final = 0.5
TIMES: Final = Times(window_s=2.0, look_back_s=20.0, settle_s=3.0, sample_s=0.5, gap_s=0.4, again_s=3.0)
"""A fifth of the defaults, so that a run takes less than a minute."""
KEYS: Final = tuple(f"key-{number}" for number in range(2_000))
HOT_LPS: Final = 256
"""The LPs of the first partition get nine of ten messages."""


@dataclass(frozen=True, slots=True)
class Run:
    """Messages per second that were handled: over the run, and at its end."""

    whole_per_s: float
    end_per_s: float


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Monotonic times in ns: of the publishing's begin and end, of each key that was sent, of each handled message."""

    began: int
    ended: int
    sent: Sequence[tuple[int, str]]
    handled: Sequence[int]


@bench("auto_route")
def auto_route(stage: Stage) -> Iterator[Line]:
    """Messages per second that four members handle, each of which can take 200/s, of 500/s of which 90 % go to one of
    four partitions: at the end of a run with automatic routes. The baseline is the best route that stays: cut by hand
    where the load is known to be even; beside it the even route. The pause is the longest of all changes, in ms."""
    best = measure(prepared(stage, by_hand=True))
    even = measure(prepared(stage))
    system = prepared(stage)
    set_policy(system.runtime, "bench", mode="on", cool_down_s=5.0, changes_per_hour=720, max_partitions=16)
    auto = measure(system, automatic=True)
    changes = [one for one in route_history(system.database, "bench") if one.state == "done"]
    pauses = [(one.ended_at - one.planned_at).total_seconds() * 1e3 for one in changes if one.ended_at]
    note(f"  best {best}, even {even}, automatic {auto}; changes {dict(Counter(one.kind for one in changes))}")
    yield compared("auto_route", auto.end_per_s, best.end_per_s, unit="msg/s at the end", target=0.95)
    yield compared("auto_route[whole run]", auto.whole_per_s, best.whole_per_s, unit="msg/s", target=None)
    yield compared("auto_route[even route]", auto.end_per_s, even.end_per_s, unit="msg/s at the end", target=None)
    yield alone("auto_route[changes]", len(changes), "changes", None)
    yield alone("auto_route[longest pause]", max(pauses, default=0.0), "ms", 1_000.0)


def prepared(stage: Stage, *, by_hand: bool = False) -> System:
    """Return a system; its route is even, or cut by hand where the load is."""
    system = stage.system(partitions=PARTITIONS)
    if by_hand:
        loads = Counter(lp_of(key.encode()) for key in turns())
        first = system.route.ranges[0]
        span = (first.lp_from, first.lp_to)
        # As many partitions as members: the cold three take a tenth together.
        points = balancing_points(loads, [span], MEMBERS)[span]
        apply_change(system.runtime, planned_split(system.runtime, "bench", first.partition, at=points))
    return system


def turns() -> list[str]:
    """Return the keys of a round: nine hot ones to each other one."""
    hot = [key for key in KEYS if lp_of(key.encode()) < HOT_LPS]
    cold = [key for key in KEYS if lp_of(key.encode()) >= HOT_LPS]
    return [cold[at // 10 % len(cold)] if at % 10 == 0 else hot[at % len(hot)] for at in range(10 * len(hot))]


def measure(system: System, *, automatic: bool = False) -> Run:
    """Return what members handled of it all, and at its end."""
    times = run_members(system, automatic=automatic)
    handled = [at for at in times.handled if at < times.ended]
    late = sum(at >= times.ended - COUNTED_S * 1e9 for at in handled)
    return Run(round(len(handled) / (times.ended - times.began) * 1e9, 1), round(late / COUNTED_S, 1))


def run_members(system: System, *, automatic: bool = False) -> RunTimes:
    """Publish at the rate while members handle; with `automatic`, passes of the autopilot run beside."""
    stopping = threading.Event()
    beside = threading.Thread(target=work, args=(system, stopping, automatic))
    with consumer_group(system, BENCH_WAIT_MS=WAIT_MS) as members:
        with closing(RouteCache(system.database)) as routes:
            settings = GroupSettings(start="latest", balance="rate")
            ensure_group(system.runtime, routes, topic="bench", name=members.group, settings=settings)
        for _ in range(MEMBERS):
            members.start(*CONSUME, "--concurrency", str(CONCURRENCY))
        wait_until(lambda: owned(system) == len(load_route(system.database, "bench").ranges))
        beside.start()
        began_ns = time.monotonic_ns()
        sent = publish(system)
        ended_ns = time.monotonic_ns()
        stopping.set()
        beside.join()
        handled = [one.at_ns for worker in members.workers for one in worker.notes(began_ns)]
    return RunTimes(began_ns, ended_ns, sent, handled)


def owned(system: System) -> int:
    """Return how many partitions have an owner."""
    with system.database.connection() as connection:
        rows = connection.execute("SELECT count(*) FROM mqlayer.assignment WHERE member_id = target").fetchall()
    return int(rows[0][0])


def publish(system: System) -> list[tuple[int, str]]:
    """Publish for the time of a run; return when, and the keys."""
    keys, sent = turns(), list[tuple[int, str]]()
    with Producer(system.settings, name="bench") as producer:
        began = time.monotonic()
        for number in range(int(SECONDS * RATE_PER_S)):
            time.sleep(max(0.0, began + number / RATE_PER_S - time.monotonic()))
            key = keys[number % len(keys)]
            producer.send_oneway("bench", key=key, body=BODY)
            sent.append((time.monotonic_ns(), key))
    return sent


def work(system: System, stopping: threading.Event, automatic: bool) -> None:
    """Do what the worker's jobs do."""
    turn = 0
    while not stopping.wait(PASS_S):
        turn += 1
        if automatic:
            auto_routes(system.runtime, times=TIMES)
        if turn % 4 == 0:
            balance_by_rate(system.runtime)
