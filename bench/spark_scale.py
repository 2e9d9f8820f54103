"""Reading, auditing and certifying snapshots of growing size, in local mode and on two workers, in one run.

`BENCH_SPARK_SIZES`: records, by default a million and ten millions of 256 bytes. `BENCH_SPARK_PLACES`: `local,cluster`.
`BENCH_SPARK_ACTS`: some of plain, jdbc, python, parquet, audit, skew, certify. Ten million records take 4 GB of disk,
an export of them 3 GB more, and sorting them 2 GB. A size for which the disk has no room is left out.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.archive_rows import ArchiveRows, archive_topic
from bench.process_trees import TreeWatch
from bench.registry import Line, bench, compared, note
from bench.stage import Stage, System
from mqlayer.archive import create_snapshot
from mqlayer.archive.parquet_export import export_snapshot
from tests.fixtures.plain_install import build_wheel
from tests.fixtures.spark_cluster import SparkCluster, cluster

SIZES: Final = tuple(int(size) for size in os.environ.get("BENCH_SPARK_SIZES", "1000000,10000000").split(","))
PLACES: Final = tuple(os.environ.get("BENCH_SPARK_PLACES", "local,cluster").split(","))
ALL_ACTS: Final = "plain,jdbc,python,parquet,audit,skew,certify"
ACTS: Final = tuple(os.environ.get("BENCH_SPARK_ACTS", ALL_ACTS).split(","))
TASK_ROWS: Final = 500_000
LEAST_TASKS: Final = 4
DRIVER: Final = Path(__file__).with_name("spark_scale_driver.py")
MEMORY: Final = {
    "local": {"spark.driver.memory": "1g"},
    "cluster": {"spark.driver.memory": "512m", "spark.executor.memory": "1g"},
}
"""The limits of Java's heaps: they stay as the snapshots grow."""
# Else the most that heaps hold is looked at every ten seconds.
WATCHED: Final = {"spark.executor.metrics.pollingInterval": "1s"}
WARM: Final = "warm"
WARM_ROWS: Final = 200_000
"""Read by each act before, which does not count."""
COMPUTED: Final = 100_000_000
ROW_BYTES: Final = {"archive": 420, "export": 300, "sorted": 200}
FREE_BYTES: Final = 8 << 30
"""Left free for others."""


class Figure(NamedTuple):
    """What an act took: seconds, processor time, the most MB by tree of processes, and MB that it spilled to disk."""

    seconds: float
    cpu_s: Mapping[str, float]
    peaks: Mapping[str, float]
    spilled_mb: float


Figures = dict[str, Figure]


@bench("spark_scale")
def spark_scale(stage: Stage) -> Iterator[Line]:
    """Records per second by each way and job, with the ratio to a plain JDBC read of the same rows in the same place;
    processor time per record, of Spark and of Postgres; the most memory of driver and executors, and what went to disk
    for want of it; seconds of a hundred million records, computed from the last two sizes."""
    taken: dict[str, dict[int, Figures]] = {place: {} for place in PLACES}
    with archive_of(stage) as (system, rows, directory), spark_on(directory) as spark:
        warm_up = grown(system, rows, directory, WARM, min(WARM_ROWS, min(SIZES) // 2))
        for size in SIZES:
            if (missing := missing_bytes(size, size - rows.rows, directory)) > 0:
                note(f"  {size:,} records are left out: {missing / 1e9:.1f} GB more disk would do")
                break
            name = f"rows-{size}"
            grown(system, rows, directory, name, size)
            for place in PLACES:
                run = SizeRun(place, size, name, rows.batches, directory / name, warm_up)
                taken[place][size] = figures(stage, system, spark, run)
                yield from lines(taken[place][size], run)
            yield from against_local(size, taken)
            shutil.rmtree(directory / name, ignore_errors=True)
    yield from computed(taken)


def grown(system: System, rows: ArchiveRows, directory: Path, name: str, size: int) -> int:
    """Take a snapshot at a size, and export it if an act reads that; return the archive's batches."""
    rows.grow(size, days=1 if name == WARM else 10)
    create_snapshot(system.runtime, name)
    if "parquet" in ACTS:
        began = time.monotonic()
        export_snapshot(system.runtime, name, directory / name, file_rows=1_000_000)
        note(f"  exported in {time.monotonic() - began:.0f} s")
    return rows.batches


def missing_bytes(size: int, more: int, directory: Path) -> int:
    """Return how much disk is missing for so many records, so many more than there are."""
    needed = more * ROW_BYTES["archive"] + size * ROW_BYTES["sorted"] + FREE_BYTES
    needed += size * ROW_BYTES["export"] if "parquet" in ACTS else 0
    return needed - shutil.disk_usage(directory).free


class SizeRun(NamedTuple):
    """A driver's task."""

    place: str
    size: int
    snapshot: str
    batches: int
    export: Path
    warm_batches: int

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
    with cluster(
        wheel.rename(directory / "mqlayer.zip"), directory, workers=workers, memory="1g", quick=False
    ) as found:
        yield found


def lines(found: Figures, run: SizeRun) -> Iterator[Line]:
    """Yield the lines of a size in a place."""
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
        yield alone(f"{name[:-1]}, spilled]", round(one.spilled_mb), "MB")


def against_local(size: int, taken: Mapping[str, Mapping[int, Figures]]) -> Iterator[Line]:
    """Yield lines of two workers against local mode."""
    local, workers = (taken.get(place, {}).get(size, {}) for place in ("local", "cluster"))
    for act in [act for act in workers if act in local]:
        rates = size / workers[act].seconds, size / local[act].seconds
        yield compared(f"spark_scale[{act}, {size:,}, workers to local]", *rates, unit="rows/s", target=None)


def computed(taken: Mapping[str, Mapping[int, Figures]]) -> Iterator[Line]:
    """Yield seconds of many more records: the last records' time, for each more."""
    for place, sizes in taken.items():
        if len(sizes) > 1:
            (few, before), (many, last) = list(sizes.items())[-2:]
            for act in [act for act in last if act in before]:
                each = (last[act].seconds - before[act].seconds) / (many - few)
                seconds = last[act].seconds + each * (COMPUTED - many)
                yield alone(f"spark_scale[{act}, {COMPUTED:,} {place}, computed]", round(seconds), "s")


def figures(stage: Stage, system: System, spark: SparkCluster, run: SizeRun) -> Figures:
    """Run a driver; return what each act took."""
    settings = MEMORY[run.place] | WATCHED | {"spark.sql.shuffle.partitions": str(run.tasks)}
    driver = spark.submit(
        DRIVER, run.snapshot, str(run.tasks), str(run.batches), run.export, str(run.warm_batches), WARM, *ACTS,
        dsn=system.dsn, master="local[2]" if run.place == "local" else None, settings=settings,
    )  # fmt: skip
    executors = [] if run.place == "local" else spark.workers

    def roots() -> dict[str, Sequence[int]]:
        trees: dict[str, Sequence[int]] = {"driver": [driver.process.pid], "Postgres": [stage.postgres.pid or 0]}
        return trees | ({"executors": [worker.pid for worker in executors]} if executors else {})

    found: Figures = {}
    with TreeWatch(roots) as watch:
        before: dict[str, float] = {}
        for said in driver.lines():
            if "begins" in said:
                watch.reset()
                before = watch.cpu_s()
                continue
            if "heaps" in said:
                note(f"  {run.place}, {run.size:,}: the most in Java's heaps: {shown(said['heaps'])} MB")
                continue
            act = said["ended"]
            check(said, run.size)
            cpu_s = {name: total - before.get(name, 0.0) for name, total in watch.cpu_s().items()}
            found[act] = Figure(said["seconds"], cpu_s, dict(watch.peaks), said["spilled_mb"])
            took = (
                f"{said['seconds']:.1f} s, {shown(cpu_s)} s, {shown(watch.peaks)} MB, {said['spilled_mb']:.0f} spilled"
            )
            note(f"  {run.place}, {run.size:,}, {act}: {took}")
    del found[WARM]
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
