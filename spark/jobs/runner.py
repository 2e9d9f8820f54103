"""Run jobs for `mqlayer analytics`, spark-submit and programs."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pyspark import SparkContext, StorageLevel
from pyspark.sql import DataFrame, SparkSession

from mqlayer.archive import Snapshot, find_snapshot
from mqlayer.errors import InvalidInput, MqlayerError
from mqlayer.escaping import escape
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.settings import Settings
from mqlayer.spark.effect_reader import effects_reader
from mqlayer.spark.html_report import page
from mqlayer.spark.jobs import audit, effects, failures, fairness, journeys, latency, skew, what_if
from mqlayer.spark.jobs.job import RECORD_COLUMNS, JobParams, JobResult, SnapshotTables
from mqlayer.spark.session import session
from mqlayer.spark.snapshot_reader import read_snapshot

JobFunction = Callable[[SnapshotTables, JobParams], JobResult]

SPARK_JOBS: Final[Mapping[str, JobFunction]] = {
    "audit": audit.run,
    "latency": latency.run,
    "skew": skew.run,
    "failures": failures.run,
    "fairness": fairness.run,
    "journeys": journeys.run,
    "what-if": what_if.run,
    "effects": effects.run,
}
ASKED_ONLY: Final = frozenset({"what-if", "effects"})
"""Jobs that `all` leaves out."""
ALL: Final = "all"
CUT: Final = "topic string, source bigint, lp int, first_seq bigint, last_seq bigint"
LOCAL: Final = {
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "16",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
"""For sessions made here; spark-submit has its own."""


def names_of(job: str) -> list[str]:
    """Return the jobs of a name or `all`. Raises InvalidInput."""
    if job == ALL:
        return [name for name in SPARK_JOBS if name not in ASKED_ONLY]
    if job not in SPARK_JOBS:
        raise InvalidInput(f"no job {job!r}: choose {', '.join(SPARK_JOBS)} or {ALL}")
    return [job]


def tables_of(
    spark: SparkSession,
    name: str,
    *,
    dsn: str | None = None,
    method: Any = None,
    partitions: int | None = None,
    export: str | None = None,
    topics: Sequence[str] = (),
) -> SnapshotTables:
    """Return a snapshot's unread tables; options: `read_snapshot`.

    Raises NotFound for the snapshot, InvalidInput for a topic.
    """
    address = Settings().control_dsn() if dsn is None else dsn
    with Database(address) as database:
        found = find_snapshot(database, name)
        cut = spark.createDataFrame(_cut(database, found), CUT)

    def read(table: Any, columns: Sequence[str] | None = None) -> Any:
        how = {"method": method, "partitions": partitions, "export": export}
        return read_snapshot(spark, name, table=table, dsn=address, columns=columns, **how)

    tables = SnapshotTables(name, read("records", RECORD_COLUMNS), read("outcomes"), read("lineage").cache(), cut)
    return tables.of_topics(topics) if topics else tables


@contextmanager
def borrowed_session(name: str, **settings: str) -> Iterator[SparkSession]:
    """Lend the running session, or one for the block."""
    if (running_already := SparkSession.getActiveSession()) is not None:
        yield running_already
        return
    # py4j logs the end of each connection.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    spark = session(name, **LOCAL | settings)
    try:
        yield spark
    finally:
        _end(spark)


@contextmanager
def running(
    tables: SnapshotTables, jobs: Sequence[str], params: JobParams | None = None
) -> Iterator[Iterator[JobResult]]:
    """Run jobs as results are taken; several share one read."""
    kept = tables.records.persist(StorageLevel.MEMORY_AND_DISK) if len(jobs) > 1 else None
    each = (SPARK_JOBS[job](tables, params or JobParams()) for job in jobs)
    try:
        yield each
    finally:
        if kept is not None:
            kept.unpersist()


def report_of(snapshot: str, found: Sequence[JobResult], *, made_at: datetime) -> str:
    """Return the results' page."""
    lead = f"Made {made_at:%Y-%m-%d %H:%M} UTC from the archive, not from the running system. Times are UTC."
    return page(f"mqlayer: snapshot {snapshot}", lead, (one.section for one in found))


def perform(
    tables: SnapshotTables,
    jobs: Sequence[str],
    *,
    params: JobParams | None = None,
    out: Path | None = None,
    html: Path | None = None,
    show: Callable[[JobResult], None] = lambda _: None,
) -> list[JobResult]:
    """Run jobs; show and write results. Raises InvalidInput for an unwritable page."""
    done = []
    with running(tables, jobs, params) as found:
        for one in found:
            show(one)
            if out is not None:
                one.write(out)
            one.release()
            done.append(one)
    if html is not None:
        text = report_of(tables.snapshot, done, made_at=datetime.now(UTC))
        try:
            html.parent.mkdir(parents=True, exist_ok=True)
            html.write_text(text, "utf-8")
        except OSError as error:
            raise InvalidInput(f"can't write the report to {html}: {error.strerror}") from error
    return done


def as_json(snapshot: str, found: JobResult) -> str:
    """Return a result as JSON line."""
    return json.dumps({"job": found.job, "snapshot": snapshot, "good": found.good, **found.facts}, default=str)


def submit(job: str, arguments: Sequence[str] | None = None) -> int:
    """Run a job under spark-submit; return 1 for errors or faults."""
    parser = argparse.ArgumentParser(description=f"{job} of a snapshot of mqlayer's archive")
    parser.add_argument("--snapshot", required=True)
    parser.add_argument("--topic", action="append", default=[], help="only this topic; may be repeated")
    parser.add_argument("--out", type=Path, help="write Parquet below this directory")
    parser.add_argument("--html", type=Path, help="write a page")
    parser.add_argument("--method", choices=("jdbc", "python"), help="how the archive is read")
    parser.add_argument("--from-export", help="take days that Postgres dropped from this export of the archive")
    parser.add_argument("--partitions", type=int, help="of skew: balance a topic for so many")
    parser.add_argument("--split-report", type=Path, help="of skew: for mqlayer route split --from-report")
    parser.add_argument("--console", help="of journeys: the console's address, for links")
    params = parser.parse_args(arguments)
    try:
        spark = session(f"mqlayer {job}")
        tables = tables_of(spark, params.snapshot, method=params.method, export=params.from_export, topics=params.topic)
        done = perform(
            tables,
            names_of(job),
            params=JobParams(
                params.partitions,
                params.split_report,
                console=params.console,
                effects=_effects(job, params.snapshot),
            ),
            out=params.out,
            html=params.html,
            show=lambda found: print(as_json(params.snapshot, found)),  # noqa: T201 - a program's answer
        )
    except MqlayerError as error:
        sys.stderr.write(f"mqlayer: {escape(str(error))}\n")
        return 1
    return 0 if all(found.good for found in done) else 1


def _effects(job: str, snapshot: str) -> Callable[[SparkSession], DataFrame] | None:
    if job != "effects":
        return None
    settings = Settings()
    return effects_reader(snapshot, dsn=settings.control_dsn(), application_dsn=settings.application_dsn())


def _end(spark: SparkSession) -> None:
    # Else the Java process outlives the session until this process ends.
    gateway: Any = spark.sparkContext._gateway  # noqa: SLF001 - there is no public way to the process
    spark.stop()
    if gateway.proc is None:
        # Under spark-submit, Java started this process, and ends after it.
        return
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()
    SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001 - the next session starts another one


def _cut(database: Database, snapshot: Snapshot) -> list[tuple[Any, ...]]:
    with database.connection() as connection:
        return connection.execute(query("snapshot_cut"), {"snapshot_id": snapshot.snapshot_id}).fetchall()
