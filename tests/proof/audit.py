"""The order audit as an oracle: what became of a system's topics is archived, cut, and looked at by Spark."""

from __future__ import annotations

import uuid
from typing import Any

from mqlayer.archive import create_snapshot
from mqlayer.postgres.database import Database
from mqlayer.spark.jobs.job import JobParams, JobResult
from mqlayer.spark.jobs.runner import SPARK_JOBS, tables_of
from tests.proof.archive_update import archive_all
from tests.proof.runtimes import runtime_of


def archive_and_audit(spark: Any, dsn: str, *, prefix: str, topics: list[str] | None = None) -> JobResult:
    """Archive all that is in the streams of archived topics, take a snapshot, and audit it; its verdict is `good`.

    Call it when nothing writes any more. The topics must have been archived from their first record on, or what they
    lacked then is not noticed.
    """
    with Database(dsn) as database:
        archive_all(database, prefix=prefix)
        snapshot = create_snapshot(runtime_of(database), f"audit-{uuid.uuid4().hex[:8]}", topics=topics)
    return SPARK_JOBS["audit"](tables_of(spark, snapshot.name, dsn=dsn), JobParams())
