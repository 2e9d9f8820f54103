"""Reading and auditing snapshots of growing size, in local mode and on a cluster of two workers, in one run.

`BENCH_SPARK_SIZES`: records, by default a million and ten millions of 256 bytes. `BENCH_SPARK_PLACES`: `local,cluster`.
`BENCH_SPARK_ACTS`: some of plain, jdbc, python, parquet, audit, skew. Ten million records take 4 GB of disk, and an
export of them 3 GB more.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.archive_rows import ArchiveRows, archive_topic
from bench.process_trees import TreeWatch
from bench.registry import Line, bench, note
from bench.stage import Stage, System
from mqlayer.archive import create_snapshot
from mqlayer.archive.parquet_export import export_snapshot
from tests.fixtures.plain_install import build_wheel
from tests.fixtures.spark_cluster import SparkCluster, cluster

SIZES: Final = tuple(int(size) for size in os.environ.get("BENCH_SPARK_SIZES", "1000000,10000000").split(","))
PLACES: Final = tuple(os.environ.get("BENCH_SPARK_PLACES", "local,cluster").split(","))
ACTS: Final = tuple(os.environ.get("BENCH_SPARK_ACTS", "plain,jdbc,python,parquet,audit,skew").split(","))
TASK_ROWS: Final = 500_000
LEAST_TASKS: Final = 4
DRIVER: Final = Path(__file__).with_name("spark_scale_driver.py")
MEMORY: Final = {
    "local": {"spark.driver.memory": "1g"},
    "cluster": {"spark.driver.memory": "512m", "spark.executor.memory": "1g"},
}
"""The limits of Java's heaps: they stay as the snapshots grow."""


class Figure(NamedTuple):
    """What an act took: seconds, processor time, and the most MB, by tree of processes."""

    seconds: float
    cpu_s: Mapping[str, float]
    peaks: Mapping[str, float]


@bench("spark_scale")
def spark_scale(stage: Stage) -> Iterator[Line]:
    """Records per second by each way and job, with the ratio to a plain JDBC read of the same rows in the same place;
    processor time per record, of Spark and of Postgres; the most memory of driver and executors."""
    with archive_of(stage) as (system, rows, directory), spark_on(directory) as spark:
        for size in SIZES:
            rows.grow(size)
            name = f"rows-{size}"
            create_snapshot(system.runtime, name)
            if "parquet" in ACTS:
                export_snapshot(system.runtime, name, directory / "export", file_rows=1_000_000)
            for place in PLACES:
                yield from lines(stage, system, spark, SizeRun(place, size, name, rows.batches, directory / "export"))
            shutil.rmtree(directory / "export", ignore_errors=True)


class SizeRun(NamedTuple):
    """A driver's task."""

    place: str
    size: int
    snapshot: str
    batches: int
    export: Path

    @property
    def tasks(self) -> int:
        """How many tasks read."""
        return max(LEAST_TASKS, self.size // TASK_ROWS)


@contextmanager
def archive_of(stage: Stage) -> Iterator[tuple[System, ArchiveRows, Path]]:
    """Lend a system with an empty archive, and a folder."""
    directory = Path(tempfile.mkdtemp(prefix="mqlayer-bench-"))
    try:
        system = stage.system(partitions=4)
        yield system, archive_topic(system.runtime), directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def spark_on(directory: Path, *, workers: int = 2) -> Iterator[SparkCluster]:
    """Lend a cluster, with the package that drivers take along in local mode, too."""
    (directory / "sources").mkdir()
    wheel = build_wheel(directory / "sources", directory / "wheels")
    shutil.rmtree(directory / "sources")
    with cluster(wheel.rename(directory / "mqlayer.zip"), directory, workers=workers, memory="1g", java="") as found:
        yield found


def lines(stage: Stage, system: System, spark: SparkCluster, run: SizeRun) -> Iterator[Line]:
    """Yield the lines of a size in a place."""
    found = figures(stage, system, spark, run)
    plain = found.get("plain")
    for act, one in found.items():
        name, rate = f"spark_scale[{act}, {run.size:,} {run.place}]", run.size / one.seconds
        base = None if plain is None or act == "plain" else run.size / plain.seconds
        ratio = None if base is None else round(rate / base, 3)
        yield Line(name=name, value=round(rate), unit="rows/s", baseline=base, ratio=ratio, target=None)
        for what, cpu_s in one.cpu_s.items():
            value = round(cpu_s / run.size * 1e6, 2)
            yield alone(f"{name[:-1]}, CPU of {what}]", value, "us per message")
        for what, mb in one.peaks.items():
            yield alone(f"{name[:-1]}, {what}]", round(mb), "MB peak")


def figures(stage: Stage, system: System, spark: SparkCluster, run: SizeRun) -> dict[str, Figure]:
    """Run a driver; return what each act took."""
    settings = MEMORY[run.place] | {"spark.sql.shuffle.partitions": str(run.tasks)}
    driver = spark.submit(
        DRIVER, run.snapshot, str(run.tasks), str(run.batches), run.export, "warm", *ACTS,
        dsn=system.dsn, master="local[2]" if run.place == "local" else None, settings=settings,
    )  # fmt: skip
    executors = [] if run.place == "local" else spark.workers

    def roots() -> dict[str, Sequence[int]]:
        trees: dict[str, Sequence[int]] = {"driver": [driver.process.pid], "Postgres": [stage.postgres.pid or 0]}
        return trees | ({"executors": [worker.pid for worker in executors]} if executors else {})

    found: dict[str, Figure] = {}
    with TreeWatch(roots) as watch:
        before: dict[str, float] = {}
        for said in driver.lines():
            if "begins" in said:
                watch.reset()
                before = watch.cpu_s()
                continue
            act = said["ended"]
            check(said, run.size)
            cpu_s = {name: total - before.get(name, 0.0) for name, total in watch.cpu_s().items()}
            found[act] = Figure(said["seconds"], cpu_s, dict(watch.peaks))
            took = f"{said['seconds']:.1f} s, {shown(cpu_s)} s, {shown(watch.peaks)} MB"
            note(f"  {run.place}, {run.size:,}, {act}: {took}")
    del found["warm"]
    return found


def check(said: Mapping[str, Any], size: int) -> None:
    """Raise unless a job found all records, and no fault."""
    if not said.get("good", True) or said.get("records", size) != size:
        raise RuntimeError(f"{said} of {size} records")


def shown(figures_of: Mapping[str, float]) -> str:
    """Return figures by name, rounded."""
    return ", ".join(f"{name} {value:,.1f}" for name, value in figures_of.items())


def alone(name: str, value: float, unit: str) -> Line:
    """Return a line without a baseline."""
    return Line(name=name, value=value, unit=unit, baseline=None, ratio=None, target=None)
