"""The order audit as an oracle: what became of a system's topics is archived, cut, and looked at by Spark."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from mqlayer.archive import create_snapshot
from mqlayer.archive.certify import certify_snapshot, judge
from mqlayer.postgres.database import Database
from mqlayer.spark.effect_reader import effects_reader
from mqlayer.spark.jobs import certify
from mqlayer.spark.jobs.job import JobParams, JobResult
from mqlayer.spark.jobs.runner import SPARK_JOBS, tables_of
from tests.proof.archive_update import archive_all
from tests.proof.runtimes import runtime_of


def archive_and_audit(spark: Any, dsn: str, *, prefix: str, topics: list[str] | None = None) -> JobResult:
    """Archive all that is in the streams of archived topics, take a snapshot, and audit it; its verdict is `good`.

    Call it when nothing writes any more. The topics must have been archived from their first record on, or what they
    lacked then is not noticed.
    """
    snapshot = archive_and_cut(dsn, prefix=prefix, topics=topics)
    return SPARK_JOBS["audit"](tables_of(spark, snapshot, dsn=dsn), JobParams())


def archive_and_cut(dsn: str, *, prefix: str, topics: list[str] | None = None) -> str:
    """Archive all that is in the streams of archived topics; return a snapshot's name."""
    with Database(dsn) as database:
        archive_all(database, prefix=prefix)
        return create_snapshot(runtime_of(database), f"audit-{uuid.uuid4().hex[:8]}", topics=topics).name


def complaints(spark: Any, dsn: str, *, prefix: str, topics: list[str], records: int) -> Iterator[str]:
    """Say what the order audit, a certificate and the effect audit find in a system at rest, of so many messages."""
    snapshot = archive_and_cut(dsn, prefix=prefix, topics=topics)
    tables = tables_of(spark, snapshot, dsn=dsn)
    found = SPARK_JOBS["audit"](tables, JobParams())
    if not found.good or found.facts["records"] != records:
        yield f"order audit: {found.facts} of {records} messages"
    with Database(dsn) as database:
        made = certify_snapshot(database, snapshot)
    # Made without Spark, checked by it.
    checked = judge(made, *certify.snapshot_contents(spark, snapshot, dsn=dsn, block_records=made.block_records))
    if not checked.good or made.audit.verdict != found.facts["verdict"] or made.records != records:
        yield f"certificate: {made.audit} of {made.records} records, {checked.differences[:5]}"
    reader = effects_reader(snapshot, dsn=dsn, application_dsn=dsn)
    effects = SPARK_JOBS["effects"](tables, JobParams(effects=reader))
    # A group that never fences has no rows; a run that archived no outcome would have nothing to decide either.
    proved = sum(one["count"] for one in effects.facts["messages"] if one["verdict"] == "proved")
    if not effects.good or not proved:
        yield f"effect audit: {effects.facts}"
