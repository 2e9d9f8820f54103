"""The archive brought up to date, for those who judge it."""

from __future__ import annotations

from mqlayer.archive import archive_pass
from mqlayer.postgres.database import Database
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of


def archive_all(database: Database, *, prefix: str) -> None:
    """Archive all that is in the streams of archived topics; call it when nothing writes any more."""

    def through() -> bool:
        report = archive_pass(runtime_of(database, prefix))
        return report.ended and not (report.skipped_nodes or report.locked_topics or report.failed or report.stopped)

    wait_until(through, timeout_s=60, what="the archive to be up to date")
