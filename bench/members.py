"""The cost of many members to Postgres, and how soon partitions go on after members vanish."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from bench.lease_cost import alone, postgres_cpu_s
from bench.processes import wait_until
from bench.registry import Line, bench, note
from bench.stage import Stage, System
from mqlayer.postgres.database import connect

MEMBERS: Final = int(os.environ.get("BENCH_MEMBERS", "60"))
PROCESSES: Final = int(os.environ.get("BENCH_PROCESSES", "2"))
GROUPS: Final = int(os.environ.get("BENCH_GROUPS", "1"))
PARTITIONS: Final = int(os.environ.get("BENCH_PARTITIONS", "120"))
SECONDS: Final = float(os.environ.get("BENCH_SECONDS", "10"))
LEASE_S: Final = float(os.environ.get("BENCH_LEASE_S", "10"))
PATIENCE_S: Final = 120.0
UNSETTLED: Final = """
    SELECT (SELECT count(*) FROM mqlayer.readable)::int - count(*) FILTER (
               WHERE m.lease_until >= now() AND a.target IS NOT DISTINCT FROM a.member_id)::int
    FROM mqlayer.assignment a LEFT JOIN mqlayer.member m USING (group_id, member_id)"""
"""How many partitions of all groups are without a living owner, or on their way to another."""


@dataclass(frozen=True, slots=True)
class Size:
    """How many members in how many processes; groups, on so many topics; partitions that they own in all."""

    members: int
    processes: int
    groups: int
    owned: int
    topics: int = 1


SIZE: Final = Size(MEMBERS, PROCESSES, GROUPS, PARTITIONS * GROUPS)


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of processes over some time, and Postgres's use of CPU meanwhile."""

    seconds: float
    took: Sequence[float]
    statements: int
    size: int
    cpu_s: float
    own_cpu_s: float

    def lines(self, name: str, of: str = "members") -> Iterator[Line]:
        """Return the figures by the second."""
        quantiles = statistics.quantiles(self.took, n=100)
        note(f"  {name}: {len(self.took) / self.seconds:,.0f} beats/s, {self.own_cpu_s:.2f} CPU s/s of members")
        yield alone(f"{of}[{name}, heartbeats]", len(self.took) / self.seconds, "1/s")
        yield alone(f"{of}[{name}, statements]", self.statements / self.seconds, "1/s")
        yield alone(f"{of}[{name}, traffic]", self.size / self.seconds / 1e3, "kB/s")
        yield alone(f"{of}[{name}, Postgres]", self.cpu_s, "CPU s/s")
        yield alone(f"{of}[{name}, p50 of a heartbeat]", quantiles[49] * 1e3, "ms")
        yield alone(f"{of}[{name}, p99 of a heartbeat]", quantiles[98] * 1e3, "ms")


class Crews:
    """Processes of members."""

    def __init__(self, system: System, size: Size = SIZE) -> None:
        self._system, self._size, each = system, size, size.members // size.processes
        self._processes = [start(system, number * each, each, size) for number in range(size.processes)]
        for process in self._processes:
            answer_of(process)
        self._bytes, self._cpu = 0.0, 0.0

    def all(self, command: str) -> list[dict[str, Any]]:
        """Send a command to all; return the answers."""
        for process in self._processes:
            send(process, command)
        return [answer_of(process) for process in self._processes]

    def first(self, command: str) -> dict[str, Any]:
        """Send a command to the first one, and return its answer."""
        send(self._processes[0], command)
        return answer_of(self._processes[0])

    def counted(self, seconds: float) -> Counts:
        """Return their counts of some seconds."""
        before = self.all("count")
        began, cpu = time.monotonic(), postgres_cpu_s(self._system.dsn)
        time.sleep(seconds)
        after = self.all("count")
        elapsed = time.monotonic() - began
        return Counts(
            elapsed,
            [each for one in after for each in one["took"]],
            sum(one["statements"] for one in after),
            sum(late["bytes"] - early["bytes"] for early, late in zip(before, after, strict=True)),
            (postgres_cpu_s(self._system.dsn) - cpu) / elapsed,
            sum(late["cpu"] - early["cpu"] for early, late in zip(before, after, strict=True)) / elapsed,
        )

    def settled_after_s(self, since: float) -> float:
        """Return how long after a time each partition has a living owner, which knows it."""
        with connect(self._system.dsn) as connection:

            def settled() -> bool:
                # Last: the look at all groups costs Postgres more than the measured heartbeats.
                owned = sum(one["owned"] for one in self.all("owned"))
                return owned == self._size.owned and connection.execute(UNSETTLED).fetchone() == (0,)

            wait_until(settled, PATIENCE_S)
        return time.monotonic() - since

    def close(self) -> None:
        """End all, at once."""
        for process in self._processes:
            process.kill()
            process.communicate()


@bench("members")
def members(stage: Stage) -> Iterator[Line]:
    """Members that only beat, in a few processes on one Postgres: heartbeats, statements and bytes by the second,
    Postgres's CPU, how long a heartbeat takes, connections; then the seconds until all partitions go on after one
    member left, and after a third of them vanished and their leases ran out. There is nothing to compare with.

    `BENCH_MEMBERS`, `BENCH_PROCESSES`, `BENCH_GROUPS`, `BENCH_PARTITIONS`, `BENCH_SECONDS`, `BENCH_LEASE_S`,
    `BENCH_CONNECTIONS` (of Postgres) change the size."""
    system = stage.system(partitions=PARTITIONS)
    with crews_of(system) as crews:
        began = time.monotonic()
        crews.all(f"join {MEMBERS // PROCESSES - 1}")
        joined = time.monotonic() - began
        yield alone("members[join all]", crews.settled_after_s(began), "s")
        note(f"  all joined after {joined:.1f} s")
        crews.counted(3.0)
        usual = crews.counted(SECONDS)
        yield from usual.lines("at rest")
        yield alone("members[connections]", connections(system), "connections")
        yield alone("members[heartbeats by one join]", by_one_join(crews, usual), "heartbeats")
        began = time.monotonic()
        crews.first("leave 1")
        yield alone("members[one left]", crews.settled_after_s(began), "s")
        third = MEMBERS // PROCESSES // 3
        crews.all(f"vanish {third}")
        ended = last_lease(system, third * PROCESSES)
        yield alone("members[a third vanished]", crews.settled_after_s(ended), "s")


def by_one_join(crews: Crews, usual: Counts) -> float:
    """Return how many more heartbeats than usual come while one more member joins."""
    usually = len(usual.took) / usual.seconds
    crews.all("count")
    began = time.monotonic()
    crews.first("join 1")
    crews.settled_after_s(began)
    counted = sum(len(one["took"]) for one in crews.all("count"))
    return counted - usually * (time.monotonic() - began)


def last_lease(system: System, count: int) -> float:
    """Return when the leases of the members that vanished have run out, by this process's clock."""
    with connect(system.dsn) as connection:
        row = connection.execute(
            "SELECT extract(epoch FROM max(lease_until) - now())::float8 FROM (SELECT lease_until FROM mqlayer.member "
            "WHERE lease_until > '-infinity' ORDER BY lease_until LIMIT %s) AS m",
            [count],
        ).fetchone()
    assert row is not None
    return time.monotonic() + float(row[0])


def connections(system: System) -> int:
    """Return how many connections members have."""
    with connect(system.dsn) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name <> 'mqlayer bench' AND datname = "
            "current_database() AND pid <> pg_backend_pid()"
        ).fetchone()
    return int(row[0]) if row else 0


@contextmanager
def crews_of(system: System, size: Size = SIZE) -> Iterator[Crews]:
    """Lend processes of members."""
    crews = Crews(system, size)
    try:
        yield crews
    finally:
        crews.close()


def start(system: System, first: int, count: int, size: Size) -> subprocess.Popen[str]:
    """Start a process of members."""
    return subprocess.Popen(
        [sys.executable, "-m", "bench.member_process", str(first), str(count), str(size.groups), str(size.topics)],
        env={**os.environ, "MQLAYER_DSN": system.dsn, "MQLAYER_LEASE_S": str(LEASE_S), "MQLAYER_LOG_LEVEL": "ERROR"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def send(process: subprocess.Popen[str], command: str) -> None:
    """Send it a command."""
    assert process.stdin is not None
    process.stdin.write(command + "\n")
    process.stdin.flush()


def answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return its next answer."""
    assert process.stdout is not None
    found: dict[str, Any] = msgspec.json.decode(process.stdout.readline())
    return found
