"""Order certificates: records per second to make one and to check it, without Spark and with it.

`BENCH_CERTIFY_ROWS`: so many records of 256 bytes, a million by default, at most five millions. Spark's figures are of
a session in this process that runs already, without Java's start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from bench.registry import Line, bench, in_turn, note
from bench.spark_scale import archive_of
from bench.stage import Stage, System
from mqlayer.archive import create_snapshot
from mqlayer.archive.certificates import BLOCK_RECORDS, Certificate, Contents
from mqlayer.archive.certify import (
    assemble,
    certify_snapshot,
    check_certificate,
    check_hashes,
    judge,
    load_certificate,
)
from mqlayer.archive.columns import WHOLE_QUERY
from mqlayer.archive.parquet_export import export_snapshot
from mqlayer.archive.snapshots import find_snapshot
from mqlayer.domain.routing import LP_COUNT
from mqlayer.postgres.arrow_reader import arrow_batches, bound, read_address

ROWS: Final = int(os.environ.get("BENCH_CERTIFY_ROWS", "1000000"))
ROUNDS: Final = int(os.environ.get("BENCH_ROUNDS", "1"))
SNAPSHOT: Final = "certified"
SPARK: Final = {
    "spark.driver.memory": "1g",
    "spark.log.level": "ERROR",
    "spark.master": "local[2]",
    "spark.sql.shuffle.partitions": "4",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


@bench("certify")
def certify(stage: Stage) -> Iterator[Line]:
    """Records per second of `analytics certify`, of its check on the snapshot, on an export and of hashes alone, by
    Python and by Spark; the base is a read of the same rows by Arrow that keeps nothing."""
    with archive_of(stage) as (system, rows, directory):
        rows.grow(ROWS)
        create_snapshot(system.runtime, SNAPSHOT)
        export_snapshot(system.runtime, SNAPSHOT, directory / "export", file_rows=ROWS // 4)
        made = certify_snapshot(system.database, SNAPSHOT)
        file = directory / "certificate.json"
        file.write_text(made.dump(), "utf-8")
        note(f"  the certificate of {made.records:,} records takes {file.stat().st_size / 1e6:.1f} MB")
        figures = in_turn(ROUNDS, plain_acts(system, made, file, directory / "export"))
        figures |= spark_figures(system, made, directory / "export")
    base = figures.pop("read")
    for name, rate in figures.items():
        yield Line(
            name=f"certify[{name}]", value=round(rate), unit="records/s", baseline=round(base),
            ratio=round(rate / base, 3), target=None,
        )  # fmt: skip


def plain_acts(system: System, made: Certificate, file: Path, export: Path) -> dict[str, Callable[[], float]]:
    """Return the acts without Spark."""
    database = system.database
    return {
        "read": rate(lambda: read(system)),
        "make": rate(lambda: same(certify_snapshot(database, SNAPSHOT), made)),
        "check": rate(lambda: good(check_certificate(database, load_certificate(file)))),
        "check export": rate(lambda: good(check_certificate(None, load_certificate(file), export=export))),
        "check hashes only": rate(lambda: good(check_hashes(load_certificate(file)))),
    }


def spark_figures(system: System, made: Certificate, export: Path) -> dict[str, float]:
    """Run the acts with Spark."""
    from mqlayer.spark.jobs import certify as job
    from mqlayer.spark.jobs.runner import borrowed_session

    def by_archive(spark: Any) -> tuple[dict[str, Any], Contents]:
        return job.snapshot_contents(spark, SNAPSHOT, dsn=system.dsn, block_records=BLOCK_RECORDS)

    def by_export(spark: Any) -> tuple[dict[str, Any], Contents]:
        return job.export_contents(spark, SNAPSHOT, str(export), block_records=BLOCK_RECORDS)

    with borrowed_session("mqlayer certify", **SPARK) as spark:
        acts = {
            "make, Spark": rate(lambda: same(assemble(*by_archive(spark), BLOCK_RECORDS, None, None), made)),
            "check, Spark": rate(lambda: good(judge(made, *by_archive(spark)))),
            "check export, Spark": rate(lambda: good(judge(made, *by_export(spark)))),
        }
        return in_turn(ROUNDS, acts)


def rate(act: Callable[[], object]) -> Callable[[], float]:
    """Return what does an act, and says how many records per second that was."""

    def run() -> float:
        began = time.perf_counter()
        act()
        return ROWS / (time.perf_counter() - began)

    return run


def read(system: System) -> None:
    """Read the rows with all columns, and keep none."""
    found = find_snapshot(system.database, SNAPSHOT)
    statement = bound(WHOLE_QUERY, {"snapshot_id": found.snapshot_id, "lp_from": 0, "lp_to": LP_COUNT})
    with arrow_batches(read_address(system.dsn), [statement], application="mqlayer bench") as batches:
        rows = sum(batch.num_rows for batch in batches)
    if rows != ROWS:
        raise RuntimeError(f"{rows} of {ROWS} records")


def same(found: Certificate, made: Certificate) -> None:
    """Raise unless both certify the same."""
    if (found.chains, found.audit) != (made.chains, made.audit) or found.records != ROWS:
        raise RuntimeError("certificates of one snapshot differ")


def good(found: Any) -> None:
    """Raise unless a check accepts."""
    if not found.good:
        raise RuntimeError(f"not accepted: {found.differences[:3]}")
