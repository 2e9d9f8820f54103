"""What heartbeats of many members cost Postgres, and whom a stall costs its lease, by the lease's length."""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.registry import Line, bench, note
from bench.stage import Stage, System
from mqlayer.consuming.engine.heartbeat import LONGEST_HEARTBEAT_S
from mqlayer.groups import GroupSettings, MemberSession, ensure_group, join, send_heartbeat
from mqlayer.postgres.database import Database, connect
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.stack.processes import children_of, identify

MEMBERS: Final = int(os.environ.get("BENCH_MEMBERS", "1000"))
GROUPS: Final = 50
"""Of 20 members each, as services have."""
ALONE: Final = 200
"""Members of one group, where each heartbeat looks at more."""
PARTITIONS: Final = 40
LEASES_S: Final = (10.0, 5.0, 3.0)
STALLS_S: Final = (1.0, 2.0)
SENDERS: Final = 8
SECONDS: Final = float(os.environ.get("BENCH_SECONDS", "10"))
MARGIN: Final = 0.2
STATEMENTS: Final = 2
"""Of a heartbeat that finds nothing to do: the lease, the assignments."""


@dataclass
class Pulse:
    """A member as its heartbeat thread: when it beats next, and how long its own lease lasts."""

    session: MemberSession
    lease_s: float
    lease_until: float = 0.0
    beats: int = 0
    pauses: int = 0
    expired: int = 0

    @property
    def every_s(self) -> float:
        """How long it waits between two beats, as members do."""
        return min(self.lease_s / 3, LONGEST_HEARTBEAT_S) * random.uniform(0.8, 1.0)

    def beat(self, database: Database) -> None:
        """Send a heartbeat; note whether the lease had run out by then, by its own clock and by Postgres'."""
        began = time.monotonic()
        answer = send_heartbeat(database, self.session, lease_s=self.lease_s)
        self.beats += 1
        # Its own clock ends earlier than Postgres', and nothing starts from then on.
        self.pauses += bool(self.lease_until) and time.monotonic() >= self.lease_until
        self.expired += not answer.known
        self.lease_until = began + self.lease_s * (1 - MARGIN)


@dataclass
class Crowd:
    """Members that beat on a few connections; `late_s`: how long after its time each beat was sent."""

    dsn: str
    pulses: Sequence[Pulse]
    late_s: list[float] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self, seconds: float) -> float:
        """Beat for some seconds; return how many CPU seconds of Postgres that took by the second."""
        shares = [self.pulses[at::SENDERS] for at in range(SENDERS)]
        with ThreadPoolExecutor(SENDERS) as pool:
            running = [pool.submit(self._send, share) for share in shares]
            before, began = postgres_cpu_s(self.dsn), time.monotonic()
            time.sleep(seconds)
            used = (postgres_cpu_s(self.dsn) - before) / (time.monotonic() - began)
            self.ended.set()
            for one in running:
                one.result()
        return used

    def _send(self, share: Sequence[Pulse]) -> None:
        now = time.monotonic()
        due = [(now + random.uniform(0, pulse.every_s), number) for number, pulse in enumerate(share)]
        heapq.heapify(due)
        with Database(self.dsn, application="bench heartbeats", max_size=1) as database:
            while not self.ended.is_set():
                at, number = heapq.heappop(due)
                self.ended.wait(max(0.0, at - time.monotonic()))
                self.late_s.append(max(0.0, time.monotonic() - at))
                share[number].beat(database)
                heapq.heappush(due, (max(at, time.monotonic() - 1) + share[number].every_s, number))


@bench("lease_cost")
def lease_cost(stage: Stage) -> Iterator[Line]:
    """Heartbeats of 1,000 members in 50 groups, at leases of 10, 5 and 3 s: statements a second, CPU seconds of
    Postgres a second, and how late a beat is. Then how many members in 1,000 stop handling because Postgres answers
    nothing for 1 or 2 s. `BENCH_MEMBERS` and `BENCH_SECONDS` change the size. There is nothing to compare with."""
    system = stage.system(partitions=PARTITIONS)
    sessions = joined(system, GROUPS, MEMBERS // GROUPS)
    for lease_s in LEASES_S:
        yield from beaten(system, sessions, lease_s)
        for stall_s in STALLS_S:
            yield stalled(system, sessions, lease_s, stall_s)
    yield from beaten(system, joined(system, 1, ALONE), LEASES_S[0], named=f", {ALONE} in one group")


def joined(system: System, groups: int, each: int) -> list[MemberSession]:
    """Have so many members join each of some new groups."""
    found: list[MemberSession] = []
    routes = RouteCache(system.database)
    try:
        for number in range(groups):
            name = f"of-{groups}-{number}"
            settings = GroupSettings()
            group = ensure_group(system.runtime, routes, topic="bench", name=name, settings=settings)
            found += [
                join(system.database, group_id=group.group_id, member_id=f"m{at}", lease_s=3_600.0)
                for at in range(each)
            ]
    finally:
        routes.close()
    return found


def beaten(system: System, sessions: Sequence[MemberSession], lease_s: float, *, named: str = "") -> Iterator[Line]:
    """Measure heartbeats without a fault."""
    crowd = Crowd(system.dsn, [Pulse(session, lease_s) for session in sessions])
    cpu = crowd.run(SECONDS)
    rate = sum(pulse.beats for pulse in crowd.pulses) / SECONDS
    late_ms = statistics.quantiles(crowd.late_s, n=100)[98] * 1000
    name = f"lease_cost[{lease_s:g} s{named}"
    note(f"  {name}]: {rate:,.0f} beats/s, {cpu:.2f} CPU s/s, p99 {late_ms:.0f} ms late")
    yield alone(f"{name}]", rate * STATEMENTS, "statements/s")
    yield alone(f"{name}, Postgres]", cpu, "CPU s/s")
    yield alone(f"{name}, p99 late]", late_ms, "ms")


def stalled(system: System, sessions: Sequence[MemberSession], lease_s: float, stall_s: float) -> Line:
    """Measure how many members a stall costs their lease: a lock on all of them stands for a server that hangs."""
    crowd = Crowd(system.dsn, [Pulse(session, lease_s) for session in sessions])
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(crowd.run, 3.0 + stall_s)
        time.sleep(2.0)
        with connect(system.dsn) as connection, connection.transaction():
            connection.execute("LOCK TABLE mqlayer.member IN ACCESS EXCLUSIVE MODE")
            time.sleep(stall_s)
        running.result()
    paused = sum(pulse.pauses > 0 for pulse in crowd.pulses)
    expired = sum(pulse.expired > 0 for pulse in crowd.pulses)
    note(f"  lease {lease_s:g} s, stall {stall_s:g} s: {paused} stopped by their own clock, {expired} expired")
    return alone(f"lease_cost[{lease_s:g} s, stalled {stall_s:g} s]", paused * 1000 / len(sessions), "in 1,000 stop")


def postgres_cpu_s(dsn: str) -> float:
    """Return the CPU seconds that all processes of a server have used, ended ones too."""
    with connect(dsn) as connection:
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        assert row is not None
        # Within: the backend ends with its connection.
        postmaster = int(stat_of(row[0])[1])
    ticks = []
    for pid in (postmaster, *(one.pid for one in children_of(identify(postmaster)))):
        # One that has ended meanwhile counts with the ended ones.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            ticks.append(stat_of(pid))
    ended = stat_of(postmaster)
    total = sum(int(one[11]) + int(one[12]) for one in ticks) + int(ended[13]) + int(ended[14])
    return total / os.sysconf("SC_CLK_TCK")


def stat_of(pid: int) -> list[str]:
    """Return the fields of a process behind its name, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()


def alone(name: str, value: float, unit: str) -> Line:
    """Return a line without a baseline."""
    return Line(name=name, value=round(value, 2), unit=unit, baseline=None, ratio=None, target=None)
