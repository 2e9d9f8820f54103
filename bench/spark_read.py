"""Reading a snapshot in Spark, against Spark's own JDBC reading of the same rows and columns without a cut."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from bench.registry import Line, bench, compared, in_turn, note
from bench.stage import Stage, System
from mqlayer.archive import create_snapshot
from mqlayer.archive.parquet_export import export_snapshot
from mqlayer.postgres.arrow_reader import read_address
from mqlayer.postgres.database import connect

ROWS: Final = int(os.environ.get("BENCH_SPARK_ROWS", "1000000"))
BODY_BYTES: Final = 128
ROUNDS: Final = int(os.environ.get("BENCH_ROUNDS", "3"))
TASKS: Final = (1, 2, 4)
TARGETS: Final = {"jdbc": 0.9, "python": 0.5, "parquet": 3.0}
FILL: Final = """
SELECT mqlayer_archive.day_make_v1((now() AT TIME ZONE 'UTC')::date);
INSERT INTO mqlayer_archive.topic SELECT topic_id, 1000 FROM mqlayer.topic;
INSERT INTO mqlayer_archive.record
SELECT t.topic_id, 1 + i * 1000 / {rows}, 1, p.partition_id, i + 1, 1, i % 1024, i / 1024 + 1, now(), now(),
       convert_to('key-' || i % 1000, 'UTF8'), NULL, NULL, convert_to(repeat('x', {size}), 'UTF8')
FROM generate_series(0, {rows} - 1) AS i, mqlayer.topic t JOIN mqlayer.partition p USING (topic_id);
INSERT INTO mqlayer_archive.mark
SELECT topic_id, source, lp, min(seq), max(seq) FROM mqlayer_archive.record GROUP BY topic_id, source, lp;
INSERT INTO mqlayer_archive.day
SELECT (now() AT TIME ZONE 'UTC')::date, topic_id, 1, 1000, {rows}, 0 FROM mqlayer.topic;
ANALYZE mqlayer_archive.record;
"""
COLUMNS: Final = (
    'version, partition_id AS partition, log_offset AS "offset", source, lp, seq, published_at, archived_at, key, '
    "tags, headers, body, batch"
)


@bench("spark_read_jdbc")
def spark_read_jdbc(stage: Stage) -> Iterator[Line]:
    """Rows per second by JDBC with the cut."""
    yield from measured(stage, "jdbc")


@bench("spark_read_python")
def spark_read_python(stage: Stage) -> Iterator[Line]:
    """Rows per second by the source in Python."""
    yield from measured(stage, "python")


@bench("spark_read_parquet")
def spark_read_parquet(stage: Stage) -> Iterator[Line]:
    """Rows per second from an export."""
    yield from measured(stage, "parquet")


def measured(stage: Stage, way: str) -> Iterator[Line]:
    """Compare a way with the plain reading, for 1, 2 and 4 tasks; an export of four files."""
    from mqlayer.spark import read_export, read_snapshot, session

    system, directory = filled(stage), Path(tempfile.mkdtemp(prefix="mqlayer-bench-"))
    spark = session("bench", master="local[2]", **{"spark.ui.enabled": "false", "spark.log.level": "ERROR"})
    try:
        path = ""
        if way == "parquet":
            began = time.perf_counter()
            export_snapshot(system.runtime, "bench", directory / "out", file_rows=ROWS // 4)
            note(f"  export: {ROWS / (time.perf_counter() - began):,.0f} rows/s")
            path = str(directory / "out")
        for tasks in TASKS:
            # Files are divided by Spark, not by us.
            spark.conf.set("spark.sql.files.minPartitionNum", str(tasks))
            figures = in_turn(
                ROUNDS,
                {
                    "plain": rate(lambda tasks=tasks: plain(spark, system, tasks)),
                    way: rate(
                        lambda tasks=tasks: (
                            read_export(spark, "bench", path)
                            if way == "parquet"
                            else read_snapshot(spark, "bench", dsn=system.dsn, method=way, partitions=tasks)
                        ).coalesce(tasks)
                    ),
                },
            )
            name = f"spark_read_{way}" + ("" if tasks == 2 else f"[{tasks} tasks]")
            yield compared(
                name, figures[way], figures["plain"], unit="rows/s", target=TARGETS[way] if tasks == 2 else None
            )
    finally:
        spark.stop()
        shutil.rmtree(directory, ignore_errors=True)


def rate(frame: Callable[[], Any]) -> Callable[[], float]:
    """Return what reads a frame once and says how many rows per second that was."""

    def run() -> float:
        began = time.perf_counter()
        frame().write.format("noop").mode("overwrite").save()
        return ROWS / (time.perf_counter() - began)

    return run


def plain(spark: Any, system: System, tasks: int) -> Any:
    """The same rows and columns by Spark's JDBC source alone, keys as texts and headers as maps."""
    from mqlayer.archive.columns import COLUMNS as DECLARED
    from mqlayer.spark import jdbc

    address = read_address(system.dsn)
    edges = [1024 * number // tasks for number in range(tasks + 1)]
    frame = spark.read.jdbc(
        jdbc.url_of(address),
        f"(SELECT 'bench' AS topic, {COLUMNS} FROM mqlayer_archive.record) AS plain",
        predicates=[f"lp >= {start} AND lp < {end}" for start, end in pairwise(edges)],
        properties={"driver": jdbc.DRIVER, "user": address.parameters["user"], "fetchsize": "10000"},
    )
    return frame.select([jdbc.declared_column(name, word) for name, word in DECLARED["records"].items()])


def filled(stage: Stage) -> System:
    """A system whose archive has so many rows, and the snapshot `bench`."""
    system = stage.system(fsync="everysec")
    with connect(system.dsn) as connection:
        connection.execute("UPDATE mqlayer.topic SET archived = true")
        connection.execute(FILL.format(rows=ROWS, size=BODY_BYTES).encode())
    create_snapshot(system.runtime, "bench")
    return system
