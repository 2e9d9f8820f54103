"""Retention: days of the archive are dropped as a whole, each in one transaction, and none that a kept snapshot needs.

What the day holds per source and LP is looked up before; then the archives of its topics are held, in the order of
their ids, as every batch and every snapshot holds them. So neither an archiver nor a snapshot stands between the look
at the snapshots, the marks and the drop.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Final, Literal

from mqlayer.errors import InvalidInput, NotFound, TransactionConflict
from mqlayer.failpoints import failpoint
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import columns, query

log = logging.getLogger(__name__)

TIMEOUTS: Final = {"lock_wait": "2s", "idle": "30s"}
"""Whoever reads or writes the archive waits behind us for the lock on its tables, so we don't wait for long."""
LONGEST_DAYS: Final = 36_500

RetentionResult = Literal["dropped", "spared", "busy"]
"""dropped; a kept snapshot needs it; somebody reads the archive for longer than a drop may wait."""


@dataclass(frozen=True, slots=True)
class DayDropped:
    """What became of a day of the archive, and how many records it held."""

    day: date
    records: int
    result: RetentionResult


def retain(database: Database, *, older_than: timedelta, actor: str = "api") -> list[DayDropped]:
    """Drop the days of the archive that ended longer ago than that, oldest first; say what became of each.

    By the time of archiving, in UTC. Marks begin behind what is dropped, in the same transaction. Safe to run twice at
    once and beside archivers and snapshots; a day that is busy, or that a snapshot needs, is left for the next call.
    Raises InvalidInput for less than a day: into what is younger archivers write.
    """
    if older_than < timedelta(days=1):
        raise InvalidInput("the archive keeps at least a day: say for example --older-than 30d")
    return _drop_days(database, older_than, actor)


def retain_by_topics(database: Database, *, actor: str = "worker") -> list[DayDropped]:
    """Drop the days that are older than each topic with something in them is to be kept; say what became of each.

    A day goes as a whole, so the longest retention of its topics counts for all of it, and one topic without any keeps
    it for ever. Else as `retain`.
    """
    return _drop_days(database, None, actor)


def set_retention(database: Database, topic: str, *, days: int | None, actor: str = "api") -> bool:
    """Say for how many days a topic's archive is kept, None for ever; say whether that changed anything.

    Written into the audit log. The worker drops what is older. Raises NotFound, InvalidInput for less than a day.
    """
    if days is not None and not 1 <= days <= LONGEST_DAYS:
        raise InvalidInput(f"the archive is kept for 1 to {LONGEST_DAYS} days, or for ever: {days} days is neither")

    def work(connection: Connection) -> bool:
        row = connection.execute(query("topic_retention"), {"topic": topic}).fetchone()
        if row is None:
            raise NotFound("topic", topic, f"create it: mqlayer topic create {topic}")
        if row[0] == days:
            return False
        connection.execute(query("topic_retention_set"), {"topic": topic, "days": days})
        write_audit(connection, actor, "topic set", topic, {"retention_days": days})
        return True

    return database.transaction(work)


def _drop_days(database: Database, older_than: timedelta | None, actor: str) -> list[DayDropped]:
    with database.connection() as connection:
        days = connection.execute(query("archive_days_old"), {"older_than": older_than, "day": None}).fetchall()
    return [_drop_day(database, day, older_than, actor) for (day,) in days]


def _drop_day(database: Database, day: date, older_than: timedelta | None, actor: str) -> DayDropped:
    with database.connection() as connection:
        contents = _contents(connection, day)
        # Long for a large day: before anything is locked. A closed day does not change, and that is looked at again.
        ends = connection.execute(query("archive_day_ends"), {"day": day}).fetchall()
    failpoint("archive.before_retention")
    records = sum(row[3] for row in contents)

    def work(connection: Connection) -> RetentionResult:
        connection.execute(query("transaction_patience"), TIMEOUTS)
        connection.execute(query("archive_topics_hold"), {"topic_ids": [row[0] for row in contents]})
        asked = {"older_than": older_than, "day": day}
        # Also where somebody else dropped it, or a topic is to be kept for longer since.
        if (
            _contents(connection, day) != contents
            or not connection.execute(query("archive_days_old"), asked).fetchall()
        ):
            return "busy"
        if connection.execute(query("archive_day_needed"), {"day": day}).fetchone() is not None:
            return "spared"
        connection.execute(query("archive_day_lock"))
        connection.execute(query("archive_marks_begin"), columns(("topics", "sources", "lps", "lasts"), ends))
        connection.execute(query("archive_day_drop"), {"day": day})
        if contents:
            write_audit(connection, actor, "archive retain", day.isoformat(), {"records": records})
        failpoint("archive.before_drop_commit")
        return "dropped"

    try:
        result = database.transaction(work, timeout_s=0.0)
    except TransactionConflict:
        result = "busy"
    log.info("archive_day_retained", extra={"day": day.isoformat(), "records": records, "word": result})
    return DayDropped(day, records, result)


def _contents(connection: Connection, day: date) -> list[tuple[Any, ...]]:
    """Return what is noted of a day: topics with their batches and counts."""
    return connection.execute(query("archive_day"), {"day": day}).fetchall()
