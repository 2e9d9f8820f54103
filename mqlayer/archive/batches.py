"""Batches: the archive's transactions, each with a lock on its topic.

Lock several topics by id, before all else of the archive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from typing import Final, TypeVar

from mqlayer.errors import StoreUnavailable
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query

log = event_logger(__name__)

Result = TypeVar("Result")

TIMEOUTS: Final = {"lock_wait": "10s", "idle": "30s"}
"""A stopped process must not block the topic."""
CONFLICT_S: Final = 10.0
STOPPED_S: Final = 60.0
"""A COPY that waits this long has a stopped client."""
TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class ArchiveBatch:
    """A topic's locked archive and the batch to write."""

    topic_id: int
    number: int
    segment: int
    at: datetime
    day: date

    def put(self, connection: Connection, *, records: int = 0, outcomes: int = 0) -> None:
        """Record the counts, last in the transaction."""
        facts = {"topic_id": self.topic_id, "batch": self.number, "day": self.day}
        connection.execute(query("archive_day_put"), facts | {"records": records, "outcomes": outcomes})
        connection.execute(query("archive_batch_put"), facts)


def in_batch(database: Database, topic_id: int, work: Callable[[Connection, ArchiveBatch], Result]) -> Result | None:
    """Run `work` in a transaction that locks a topic's archive; None if the topic is not archived.

    `work` ends with `batch.put`, and is repeated after a conflict.
    """

    def attempt(connection: Connection) -> tuple[bool, Result | None]:
        connection.execute(query("transaction_patience"), TIMEOUTS)
        row = connection.execute(query("archive_topic_hold"), {"topic_id": topic_id}).fetchone()
        if row is None:
            return True, None
        number, segment, at, day, made = row
        if not made:
            return False, None
        return True, work(connection, ArchiveBatch(topic_id, number + 1, segment, at, day))

    for _ in range(TRIES):
        done, result = database.transaction(attempt, timeout_s=CONFLICT_S)
        if done:
            return result
        make_days(database)
    raise StoreUnavailable(database.address, "the archive's table partitions of today are dropped as soon as made")


def make_days(database: Database) -> None:
    """Create the table partitions of today and tomorrow."""
    database.transaction(lambda connection: connection.execute(query("archive_days_make")).fetchall())


def end_stopped(database: Database) -> int:
    """End sessions stopped in a COPY, which no timeout ends; return their number."""
    with database.connection() as connection:
        rows = connection.execute(query("archive_end_stopped"), {"stopped_s": STOPPED_S}).fetchall()
    if rows:
        log.warning("archiver_ended", extra={"sessions": len(rows)})
    return len(rows)
