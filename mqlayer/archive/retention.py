"""Drop whole days of the archive, except those that snapshots need: `docs/design/archive.md`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Final, Literal

from mqlayer.domain.protocol import KEEP_UNTIL_EXPORTED
from mqlayer.errors import Conflict, InvalidInput, NotFound, TransactionConflict
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection
from mqlayer.postgres.protocol import read_protocols
from mqlayer.postgres.queries import columns, query
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

TIMEOUTS: Final = {"lock_wait": "2s", "idle": "30s"}
"""Short: readers and writers queue behind our table lock."""
LONGEST_DAYS: Final = 36_500

RetentionResult = Literal["dropped", "spared", "unexported", "busy"]
"""`spared`: a snapshot needs it. `unexported`: a topic waits for a verified export. `busy`: in use, or changed."""


@dataclass(frozen=True, slots=True)
class DayDropped:
    """A day's result and number of records."""

    day: date
    records: int
    result: RetentionResult


def retain(runtime: Runtime, *, older_than: timedelta) -> list[DayDropped]:
    """Drop days of archiving (UTC) that ended more than `older_than` ago, oldest first.

    Safe to run concurrently. The next call retries busy or spared days. Raises InvalidInput for less than a day.
    """
    _check_age(older_than)
    return _drop_days(runtime, older_than)


def old_days(runtime: Runtime, *, older_than: timedelta) -> list[date]:
    """Return the days that `retain` would look at, oldest first. Raises InvalidInput for less than a day."""
    _check_age(older_than)
    return _old_days(runtime, older_than)


def retain_by_topics(runtime: Runtime) -> list[DayDropped]:
    """As `retain`, by the longest retention of a day's topics; none means for ever."""
    return _drop_days(runtime, None)


def set_retention(runtime: Runtime, topic: str, *, days: int | None) -> bool:
    """Keep a topic's archive for 1 to 36,500 days, None for ever; return whether that changed anything. Audited. Raises
    NotFound, InvalidInput."""
    if days is not None and not 1 <= days <= LONGEST_DAYS:
        raise InvalidInput(f"the archive is kept for 1 to {LONGEST_DAYS} days, or for ever: {days} days is neither")

    def work(connection: Connection) -> bool:
        row = connection.execute(query("topic_retention"), {"topic": topic}).fetchone()
        if row is None:
            raise NotFound("topic", topic, f"create it: mqlayer topic create {topic}")
        if row[0] == days:
            return False
        connection.execute(query("topic_retention_set"), {"topic": topic, "days": days})
        said = {"retention_days": days, "before": {"retention_days": row[0]}}
        write_audit(connection, runtime.actor, "topic set", topic, said)
        return True

    return runtime.control.transaction(work)


def set_keep_until_exported(runtime: Runtime, topic: str, *, keep: bool) -> bool:
    """Let retention wait until a topic's days are exported and verified, and drop them under snapshots then; return
    whether that changed anything. Audited. Raises NotFound, Conflict before `upgrade finalize`."""

    def work(connection: Connection) -> bool:
        row = connection.execute(query("topic_exported_kept"), {"topic": topic}).fetchone()
        if row is None:
            raise NotFound("topic", topic, f"create it: mqlayer topic create {topic}")
        if row[0] == keep:
            return False
        feature = KEEP_UNTIL_EXPORTED
        if keep and read_protocols(connection, feature.schema).served.in_force < feature.since:
            raise Conflict(
                "retention and readers of the former release know no exports, and may live",
                "run `mqlayer upgrade finalize` first",
            )
        connection.execute(query("topic_exported_set"), {"topic": topic, "keep": keep})
        said = {"keep_until_exported": keep, "before": {"keep_until_exported": row[0]}}
        write_audit(connection, runtime.actor, "topic set", topic, said)
        return True

    return runtime.control.transaction(work)


def _check_age(older_than: timedelta) -> None:
    if older_than < timedelta(days=1):
        raise InvalidInput("the archive keeps at least a day: say for example --older-than 30d")


def _drop_days(runtime: Runtime, older_than: timedelta | None) -> list[DayDropped]:
    return [_drop_day(runtime, day, older_than) for day in _old_days(runtime, older_than)]


def _old_days(runtime: Runtime, older_than: timedelta | None) -> list[date]:
    with runtime.control.connection() as connection:
        days = connection.execute(query("archive_days_old"), {"older_than": older_than, "day": None}).fetchall()
    return [day for (day,) in days]


def _drop_day(runtime: Runtime, day: date, older_than: timedelta | None) -> DayDropped:
    with runtime.control.connection() as connection:
        contents = _contents(connection, day)
        # Slow for a large day, so before any lock; a changed day is noticed below.
        ends = connection.execute(query("archive_day_ends"), {"day": day}).fetchall()
    failpoint("archive.before_retention")
    records = sum(row[3] for row in contents)

    def work(connection: Connection) -> RetentionResult:
        connection.execute(query("transaction_patience"), TIMEOUTS)
        connection.execute(query("archive_topics_hold"), {"topic_ids": [row[0] for row in contents]})
        asked = {"older_than": older_than, "day": day}
        # Another process may have dropped it, or raised a topic's retention.
        if (
            _contents(connection, day) != contents
            or not connection.execute(query("archive_days_old"), asked).fetchall()
        ):
            return "busy"
        if connection.execute(query("archive_day_needed"), {"day": day}).fetchone() is not None:
            return "spared"
        if connection.execute(query("archive_day_unexported"), {"day": day}).fetchone() is not None:
            return "unexported"
        connection.execute(query("archive_day_lock"))
        connection.execute(query("archive_marks_begin"), columns(("topics", "sources", "lps", "lasts"), ends))
        connection.execute(query("archive_day_drop"), {"day": day})
        if contents:
            write_audit(connection, runtime.actor, "archive retain", day.isoformat(), {"records": records})
        failpoint("archive.before_drop_commit")
        return "dropped"

    try:
        result = runtime.control.transaction(work, timeout_s=0.0)
    except TransactionConflict:
        result = "busy"
    log.info("archive_day_retained", extra={"day": day.isoformat(), "records": records, "word": result})
    return DayDropped(day, records, result)


def _contents(connection: Connection, day: date) -> list[tuple[Any, ...]]:
    return connection.execute(query("archive_day"), {"day": day}).fetchall()
