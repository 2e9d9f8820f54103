"""Index the archive's ended days by LP, for searches by key and identity."""

from __future__ import annotations

from typing import Final

from mqlayer.logs import event_logger
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

DAYS_AT_ONCE: Final = 7


def index_days(runtime: Runtime) -> int:
    """Index ended days that have no index, the latest first; return how many. Safe to run concurrently."""
    with runtime.control.connection() as connection:
        days = connection.execute(query("archive_days_unindexed"), {"limit": DAYS_AT_ONCE}).fetchall()
    count = 0
    for (day,) in days:

        def work(connection: Connection, day: object = day) -> bool:
            # A large day takes longer than a worker's statements may.
            connection.execute(query("statement_time"), {"wait": "0"})
            row = connection.execute(query("archive_day_index"), {"day": day}).fetchone()
            return row is not None and bool(row[0])

        if runtime.control.transaction(work, timeout_s=0.0):
            count += 1
            log.info("archive_day_indexed", extra={"day": str(day)})
    return count
