"""How long partitions get stuck when a member dies, leaves or joins: real processes under steady load."""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

from bench.processes import CONSUME, ConsumerGroup, Note, Worker, consumer_group, wait_until
from bench.registry import Line, bench, compared, note
from bench.stage import BODY, KEYS, Stage, System
from mqlayer.consuming.engine.heartbeat import LONGEST_HEARTBEAT_S
from mqlayer.domain.message import records_of
from mqlayer.domain.routing import lp_of
from mqlayer.outbox import publish as publish_row
from mqlayer.postgres.database import Connection, connect
from mqlayer.producing import Producer
from mqlayer.redis.keys import partition_keys
from mqlayer.relay.lp_leases import LP_SETS
from mqlayer.stack.processes import children_of, identify

PARTITIONS: Final = 64
RATE_PER_S: Final = 20 * PARTITIONS
"""To all partitions in turn: one message in 50 ms to each."""
KEYS_EACH: Final = 4
ROUNDS: Final = 3
LEASES_S: Final = (10.0, 2.0)
LEAVE_LIMIT_S: Final = 2.0
CRASHES: Final = 10
CRASH_LIMIT_MS: Final = 300.0
WINDOW_S: Final = 3.0
PARTS: Final = """
SELECT relay_id, array_agg(lp_set) FROM mqlayer_app.lp_set WHERE relay_id IS NOT NULL AND lease_until >= now()
GROUP BY relay_id
"""


@bench("takeover")
def takeover(stage: Stage) -> Iterator[Line]:
    """Seconds from SIGKILL of one of two members to the first message that the other one handles of the partitions it
    takes over, and until it has handled one of each. The baseline is the lease, which has to run out; the target is one
    heartbeat more. Then the same from SIGTERM, where the target is in seconds."""
    system = stage.system(partitions=PARTITIONS)
    with publishing(system):
        for lease_s in LEASES_S:
            name = "takeover" if lease_s == LEASES_S[0] else f"takeover[lease {lease_s:g} s]"
            first_s, last_s = losses(system, signal.SIGKILL, lease_s)
            target = round(1 + min(lease_s / 3, LONGEST_HEARTBEAT_S) / lease_s, 2)
            yield compared(name, first_s, lease_s, unit="s", target=target)
            last = name.replace("]", ", last partition]") if "[" in name else f"{name}[last partition]"
            yield compared(last, last_s, lease_s, unit="s", target=None)
        first_s, last_s = losses(system, signal.SIGTERM, LEASES_S[0])
        yield alone("takeover[leave]", first_s, "s", LEAVE_LIMIT_S)
        yield alone("takeover[leave, last partition]", last_s, "s", LEAVE_LIMIT_S)


@bench("takeover_crash")
def takeover_crash(stage: Stage) -> Iterator[Line]:
    """Milliseconds from SIGKILL of one of two processes of `mqlayer consume --processes 2` to the first message that
    the other one handles of the partitions that it takes over, and until it has handled one of each: the lease is 10 s,
    and nobody waits for it. The same of two relays of one command, to the first message of its LPs in their partition,
    and of each of its LP sets. `BENCH_CRASHES` says how many are killed."""
    system = stage.system(partitions=PARTITIONS)
    firsts, lasts = [], []
    with publishing(system), consumer_group(system, BENCH_EACH=1) as members:
        worker = members.start("-m", "bench.quick_restarts", *CONSUME[2:], "--processes", "2")
        for number in range(int(os.environ.get("BENCH_CRASHES", CRASHES))):
            first_ms, last_ms = crash(worker)
            firsts.append(first_ms)
            lasts.append(last_ms)
            note(f"  crash {number + 1}: {first_ms:.0f} ms, all {last_ms:.0f} ms")
        # In order: children of a killed one would still arm the node, which the next system empties.
        worker.end()
        worker.process.wait()
    yield alone("takeover_crash", statistics.median(firsts), "ms", CRASH_LIMIT_MS)
    yield alone("takeover_crash[slowest]", max(firsts), "ms", CRASH_LIMIT_MS)
    yield alone("takeover_crash[last partition]", statistics.median(lasts), "ms", None)
    yield alone("takeover_crash[slowest, last partition]", max(lasts), "ms", None)
    yield from relay_crashes(stage)


@bench("join")
def join(stage: Stage) -> Iterator[Line]:
    """Milliseconds from a third member's call to join to the first message that it handles, and until it has handled
    one of each partition that it gets; the same from the start of its process. Then the longest gap in partitions that
    did not move, beside the same without a join, and in those that moved."""
    system = stage.system(partitions=PARTITIONS)
    with publishing(system), consumer_group(system) as members:
        for _ in range(2):
            members.start()
        members.await_balance(PARTITIONS)
        joins = [Joining(members, in_process=True) for _ in range(ROUNDS)]
        starts = [Joining(members, in_process=False) for _ in range(ROUNDS)]
    yield alone("join", median(one.first_ms for one in joins), "ms", None)
    yield alone("join[last partition]", median(one.last_ms for one in joins), "ms", None)
    yield alone("join[from the process's start]", median(one.first_ms for one in starts), "ms", None)
    calm_ms, staying_ms = (median(gaps) for gaps in zip(*(one.gaps_ms for one in joins), strict=True))
    yield compared("join[gap of others]", staying_ms, calm_ms, unit="ms longest gap", target=1.0)
    moved_ms = median(one.moved_gap_ms for one in joins)
    yield compared("join[gap of moved]", moved_ms, calm_ms, unit="ms longest gap", target=None)


def losses(system: System, number: signal.Signals, lease_s: float) -> tuple[float, float]:
    """Lose a member of two some times; return the medians until the first and until the last partition goes on."""
    figures = []
    with consumer_group(system, MQLAYER_LEASE_S=lease_s) as members:
        members.start()
        for _ in range(ROUNDS):
            members.start()
            members.await_balance(PARTITIONS)
            # At any moment of its heartbeats.
            time.sleep(random.uniform(0, LONGEST_HEARTBEAT_S))
            victim, successor = members.workers
            figures.append(lose(members, victim, successor, number))
            note(f"  {number.name}, lease {lease_s:g} s: {figures[-1][0]:.2f} s, all {figures[-1][1]:.2f} s")
    firsts, lasts = zip(*figures, strict=True)
    return statistics.median(firsts), statistics.median(lasts)


def lose(members: ConsumerGroup, victim: Worker, successor: Worker, number: signal.Signals) -> tuple[float, float]:
    """End a member; return how long until the first and the last of its partitions goes on, in s."""
    lost = victim.partitions(time.monotonic_ns() - int(0.5e9))
    at_ns = members.end(victim, number)
    wait_until(lambda: lost <= successor.partitions(at_ns))
    firsts = first_of_each(successor.notes(at_ns), lost)
    victim.process.communicate()
    return (min(firsts) - at_ns) / 1e9, (max(firsts) - at_ns) / 1e9


def crash(worker: Worker) -> tuple[float, float]:
    """Kill a child of a supervisor; return how long until the first and the last of its partitions goes on, in ms."""
    supervisor = identify(worker.process.pid)

    def shares() -> dict[int, set[int]]:
        since_ns = time.monotonic_ns() - int(0.5e9)
        return {child.pid: worker.child(child.pid).partitions(since_ns) for child in children_of(supervisor)}

    wait_until(lambda: sorted(map(len, shares().values())) == [PARTITIONS // 2] * 2)
    # At any moment of its heartbeats.
    time.sleep(random.uniform(0, LONGEST_HEARTBEAT_S))
    victim, survivor = random.sample(list(shares()), 2)
    lost, successor = shares()[victim], worker.child(survivor)
    at_ns = time.monotonic_ns()
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: lost <= successor.partitions(at_ns))
    firsts = first_of_each(successor.notes(at_ns), lost)
    return (min(firsts) - at_ns) / 1e6, (max(firsts) - at_ns) / 1e6


def relay_crashes(stage: Stage) -> Iterator[Line]:
    """Kill relays of `mqlayer relay --processes 2`."""
    system = stage.system()
    with consumer_group(system) as processes, connect(system.dsn) as connection:
        worker = processes.start("-m", "bench.quick_restarts", "relay", "--processes", "2")
        figures = []
        for number in range(int(os.environ.get("BENCH_CRASHES", CRASHES))):
            figures.append(relay_crash(system, connection))
            note(f"  relay's crash {number + 1}: {figures[-1][0]:.0f} ms, all {figures[-1][1]:.0f} ms")
        worker.end()
        worker.process.wait()
    firsts, lasts = zip(*figures, strict=True)
    yield alone("takeover_crash[relay]", statistics.median(firsts), "ms", CRASH_LIMIT_MS)
    yield alone("takeover_crash[relay, slowest]", max(firsts), "ms", CRASH_LIMIT_MS)
    yield alone("takeover_crash[relay, last LP set]", statistics.median(lasts), "ms", None)


def relay_crash(system: System, connection: Connection) -> tuple[float, float]:
    """Kill one of two relays; return how long until the first and the last of its LP sets goes on, in ms."""

    def parts() -> dict[str, list[int]]:
        return dict(connection.execute(PARTS).fetchall())

    wait_until(lambda: [len(lp_sets) for lp_sets in parts().values()] == [LP_SETS // 2] * 2)
    time.sleep(random.uniform(0, LONGEST_HEARTBEAT_S))
    victim = random.choice(list(parts()))
    keys = {lp_set: next(key for key in KEYS if lp_of(key.encode()) >> 6 == lp_set) for lp_set in parts()[victim]}
    log = partition_keys(system.runtime.prefix, system.route.ranges[0].partition).log
    lasts: dict[int, float] = {}
    with system.client() as client:
        newest: Any = client.xrevrange(log, count=1)
        last = newest[0][0] if newest else b"0-0"
        at = time.monotonic()
        os.kill(int(victim.split("-")[-2]), signal.SIGKILL)
        for key in keys.values():
            publish_row(connection, "bench", key=key, body=BODY)
        while len(lasts) < len(keys):
            found: Any = client.xread({log: last}, block=1000)
            for _, entries in found:
                last = entries[-1][0]
                for lp_set in {record.identity.lp >> 6 for record in records_of(flat(entries))} & set(keys):
                    lasts.setdefault(lp_set, (time.monotonic() - at) * 1e3)
    return min(lasts.values()), max(lasts.values())


def flat(entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> list[tuple[bytes, list[bytes]]]:
    """Return entries as Redis gives them, not as its client does."""
    return [(entry_id, [part for pair in fields.items() for part in pair]) for entry_id, fields in entries]


class Joining:
    """A third member that came and went: what was seen of it."""

    def __init__(self, members: ConsumerGroup, *, in_process: bool) -> None:
        others = list(members.workers)
        time.sleep(WINDOW_S)
        at_ns = time.monotonic_ns()
        if in_process:
            newcomer = members.start("-m", "bench.consumer_process", "join")
            newcomer.await_ready()
            time.sleep(WINDOW_S)
            at_ns = time.monotonic_ns()
            newcomer.go()
        else:
            newcomer = members.start()
        share = PARTITIONS // (len(others) + 1)
        wait_until(lambda: len(newcomer.partitions(0)) >= share)
        time.sleep(max(0.0, WINDOW_S - (time.monotonic_ns() - at_ns) / 1e9))
        moved = newcomer.partitions(0)
        firsts = first_of_each(newcomer.notes(), moved)
        self.first_ms, self.last_ms = (min(firsts) - at_ns) / 1e6, (max(firsts) - at_ns) / 1e6
        window_ns = int(WINDOW_S * 1e9)
        notes = [one for worker in members.workers for one in worker.notes(at_ns - window_ns)]
        staying = {one.partition for one in notes} - moved
        self.gaps_ms = (
            longest_gap_ms(notes, staying, at_ns - window_ns, at_ns),
            longest_gap_ms(notes, staying, at_ns, at_ns + window_ns),
        )
        self.moved_gap_ms = longest_gap_ms(notes, moved, at_ns, at_ns + window_ns)
        note(f"  {'join' if in_process else 'start'}: first {self.first_ms:.0f} ms, last {self.last_ms:.0f} ms, "
             f"{len(moved)} moved; gaps without {self.gaps_ms[0]:.0f} ms, with {self.gaps_ms[1]:.0f} ms, "
             f"of moved {self.moved_gap_ms:.0f} ms")  # fmt: skip
        members.end(newcomer)
        newcomer.process.communicate()
        members.await_balance(PARTITIONS)


def first_of_each(notes: Sequence[Note], partitions: set[int]) -> list[int]:
    """Return when the first message of each partition was handled."""
    firsts: dict[int, int] = {}
    for one in notes:
        if one.partition in partitions:
            firsts[one.partition] = min(one.at_ns, firsts.get(one.partition, one.at_ns))
    return list(firsts.values())


def longest_gap_ms(notes: Sequence[Note], partitions: set[int], from_ns: int, to_ns: int) -> float:
    """Return the longest time between two messages of one partition within a time, of all these partitions."""
    times: dict[int, list[int]] = {partition: [from_ns, to_ns] for partition in partitions}
    for one in notes:
        if one.partition in partitions and from_ns <= one.at_ns <= to_ns:
            times[one.partition].append(one.at_ns)
    return max(after - before for found in times.values() for before, after in pairwise(sorted(found))) / 1e6


@contextmanager
def publishing(system: System) -> Iterator[None]:
    """Publish to all partitions in turn at the rate, in a thread."""
    stopping = threading.Event()
    with Producer(system.settings, name="bench") as producer:
        thread = threading.Thread(target=publish, args=(producer, keys_in_turn(system), stopping))
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()


def publish(producer: Producer, keys: Sequence[str], stopping: threading.Event) -> None:
    """Publish at the rate until it is told to stop."""
    began, number = time.monotonic(), 0
    while not stopping.is_set():
        time.sleep(max(0.0, began + number / RATE_PER_S - time.monotonic()))
        producer.send_oneway("bench", key=keys[number % len(keys)], body=BODY)
        number += 1


def keys_in_turn(system: System) -> list[str]:
    """Return some keys of each partition, such that partitions come in turn."""
    found: dict[int, list[str]] = {one.partition: [] for one in system.route.ranges}
    number = 0
    while min(map(len, found.values())) < KEYS_EACH:
        key = f"key-{number}"
        found[system.partition_of(lp_of(key.encode()))].append(key)
        number += 1
    return [keys[turn] for turn in range(KEYS_EACH) for keys in found.values()]


def median(values: Iterator[float] | Sequence[float]) -> float:
    """Return the median of some figures."""
    return statistics.median(list(values))


def alone(name: str, value: float, unit: str, target: float | None) -> Line:
    """Return a line that is compared with nothing; the target is in its unit."""
    return Line(name=name, value=round(value, 3), unit=unit, baseline=None, ratio=None, target=target)
