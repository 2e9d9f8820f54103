"""What the run ends with: the archive, a snapshot of it, and the order audit of that by Spark."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from mqlayer.archive import archive_pass, create_snapshot
from mqlayer.archive.certify import certify_snapshot
from mqlayer.cli.spark_requirements import check_spark
from mqlayer.errors import SparkMissing
from mqlayer.postgres.database import Database
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings

SNAPSHOT: Final = "bank"
PATIENCE_S: Final = 60.0
SMALL: Final = {
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
}
"""For the archive of a minute: more tasks, and code that Spark compiles for each query, take longer than they save."""

Audit = Callable[[str], str | None]
"""Says what the order audit finds in the archive of a control database: clean, not clean; None where it is left out."""


class ArchiveFailed(Exception):
    """The archive could not be brought up to date."""


def archive(control_dsn: str) -> int:
    """Archive all that was published, and take a snapshot; return how many records that holds."""
    until = time.monotonic() + PATIENCE_S
    with Database(control_dsn) as database:
        runtime = Runtime(database, Settings(), actor="bank")
        while True:
            report = archive_pass(runtime)
            behind = [*report.skipped_nodes.values(), *report.failed.values(), *report.locked_topics, *report.stopped]
            if report.ended and not behind:
                return create_snapshot(runtime, SNAPSHOT).records
            if time.monotonic() > until:
                raise ArchiveFailed(f"the archive is not up to date after {PATIENCE_S:g} s: {behind}")


def certify(control_dsn: str, directory: Path) -> str | None:
    """Write an order certificate of the snapshot, and say what its check says; None without the packages for it."""
    if find_spec("pyarrow") is None or find_spec("adbc_driver_postgresql") is None:
        return None
    path = directory / "certificate.json"
    with Database(control_dsn) as database:
        made = certify_snapshot(database, SNAPSHOT)
    path.write_text(made.dump(), "utf-8")
    # The command, as anyone would check it later.
    command = [sys.executable, "-m", "mqlayer", "analytics", "certify", "--check", str(path), "--no-spark"]
    done = subprocess.run(command, env={**os.environ, "MQLAYER_DSN": control_dsn}, check=False)
    return "accepted" if done.returncode == 0 and made.audit.verdict == "clean" else "not accepted"


@contextmanager
def spark_begun(note: Callable[[str], None]) -> Iterator[Audit]:
    """Lend the order audit by Spark, which starts meanwhile; where it can't run here, a note says so."""
    try:
        check_spark()
    except SparkMissing as missing:
        note(f"the order audit is left out: {missing}")
        yield lambda _: None
        return
    from mqlayer.spark.jobs.job import JobParams
    from mqlayer.spark.jobs.runner import SPARK_JOBS, borrowed_session, tables_of

    with ExitStack() as session, ThreadPoolExecutor(1) as starting:
        begun = starting.submit(session.enter_context, borrowed_session("mqlayer bank", **SMALL))

        def audit(control_dsn: str) -> str:
            tables = tables_of(begun.result(), SNAPSHOT, dsn=control_dsn)
            return str(SPARK_JOBS["audit"](tables, JobParams()).facts["verdict"])

        yield audit


@contextmanager
def no_spark() -> Iterator[Audit]:
    """Lend no audit."""
    yield lambda _: None
