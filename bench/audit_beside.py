"""Publishing beside an audit of a snapshot that goes round and round, against publishing alone.

Spark and Postgres share the machine's processors with the publishers here. Three rounds part their causes: Spark as it
is, Spark at the lowest priority, and Spark and its sessions of Postgres at the lowest priority, which leaves disks,
locks and caches. A fourth one holds a reading transaction open and reads nothing.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import psycopg

from bench.outbox import pgbench_program, write_scripts
from bench.processes import wait_until
from bench.registry import Line, bench, compared, note
from bench.spark_scale import DRIVER, MEMORY, archive_of, spark_on
from bench.stage import Stage, System
from mqlayer.archive import create_snapshot
from tests.fixtures.spark_cluster import Driver, SparkCluster, descendants

ROWS: Final = int(os.environ.get("BENCH_ROWS", "2000000"))
ROUNDS: Final = int(os.environ.get("BENCH_ROUNDS", "2"))
ROUND_S: Final = 10
CLIENTS: Final = 8
TASKS: Final = 8
MANY: Final = 100
LOWEST: Final = 19
RENICE_S: Final = 0.1
SESSIONS: Final = "SELECT pid FROM pg_stat_activity WHERE application_name = 'mqlayer spark'"
START_S: Final = 120.0


class PublishRate(NamedTuple):
    """What clients did."""

    per_s: float
    p99_ms: float


@bench("audit_beside")
def audit_beside(stage: Stage) -> Iterator[Line]:
    """Transactions per second of eight clients that publish, and their p99, beside an audit, against alone."""
    figures: dict[str, list[PublishRate]] = {}

    def take(name: str, system: System, script: Path) -> None:
        figures.setdefault(name, []).append(publish(system, script))
        note(f"  {name}: {figures[name][-1].per_s:,.0f} a second, p99 {figures[name][-1].p99_ms:.1f} ms")

    with archive_of(stage) as (system, rows, directory), spark_on(directory, workers=0) as spark:
        script = write_scripts(directory)["publish"]
        rows.grow(ROWS)
        create_snapshot(system.runtime, "beside")
        publish(system, script)
        for _ in range(ROUNDS):
            take("alone", system, script)
            with auditing(spark, system, rows.batches) as driver:
                take("audit", system, script)
                lower(descendants(driver.process.pid))
                take("audit, Spark at lowest priority", system, script)
                with lowered_sessions(system):
                    take("audit, its sessions too", system, script)
            take("alone", system, script)
            with held_transaction(system):
                take("open transaction", system, script)
    alone = figures.pop("alone")
    for name, taken in figures.items():
        for part, unit in (("per_s", "transactions/s"), ("p99_ms", "ms p99")):
            ours, base = (statistics.median(getattr(one, part) for one in some) for some in (taken, alone))
            target = 0.9 if part == "per_s" and "lowest" in name else None
            yield compared(f"audit_beside[{name}, {part}]", ours, base, unit=unit, target=target)


def publish(system: System, script: Path) -> PublishRate:
    """Publish as fast as the clients can."""
    with tempfile.TemporaryDirectory(prefix="mqlayer-bench-") as logs:
        command = [pgbench_program(), "--no-vacuum", "--protocol=prepared", f"--client={CLIENTS}", f"--time={ROUND_S}"]
        command += [f"--file={script}", "--log", f"--log-prefix={logs}/log", system.dsn]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"pgbench failed: {done.stderr}")
        taken = sorted(int(line.split()[2]) for log in Path(logs).iterdir() for line in log.read_text().splitlines())
    return PublishRate(len(taken) / ROUND_S, taken[int(len(taken) * 0.99)] / 1e3)


@contextmanager
def auditing(spark: SparkCluster, system: System, batches: int) -> Iterator[Driver]:
    """Have a driver in local mode audit until the block ends; one audit is over as it begins."""
    acts = ["audit"] * MANY
    driver = spark.submit(
        DRIVER, "beside", str(TASKS), str(batches), "none", "0", *acts,
        dsn=system.dsn, master="local[2]", settings=MEMORY["local"] | {"spark.sql.shuffle.partitions": str(TASKS)},
    )  # fmt: skip
    ended = threading.Event()

    def follow() -> None:
        # Killed at the end, it ends with an error.
        with suppress(AssertionError):
            for said in driver.lines():
                if "ended" in said:
                    note(f"    an audit took {said['seconds']:.1f} s")
                    ended.set()

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        wait_until(ended.is_set, START_S)
        yield driver
    finally:
        driver.stop()
        follower.join()


def lower(pids: Sequence[int]) -> None:
    """Give processes, with all their threads, the lowest priority."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            try:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), LOWEST)
            except (PermissionError, ProcessLookupError):
                continue


@contextmanager
def lowered_sessions(system: System) -> Iterator[None]:
    """Give Spark's sessions the lowest priority as they come."""
    ended = threading.Event()

    def follow() -> None:
        with psycopg.connect(system.dsn, autocommit=True) as connection:
            while not ended.wait(RENICE_S):
                lower([pid for (pid,) in connection.execute(SESSIONS).fetchall()])

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


@contextmanager
def held_transaction(system: System) -> Iterator[None]:
    """Hold a transaction that began to read the archive."""
    with psycopg.connect(system.dsn) as connection, connection.cursor(name="held") as cursor:
        cursor.execute("SELECT seq FROM mqlayer_archive.record")
        cursor.fetchone()
        yield
