"""Whether the periodic jobs run: what a health check asks of workers and beat that it can't reach itself."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from mqlayer.domain.jobs import JOBS
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

LATE_FACTS: Final[dict[str, list[str] | list[float]]] = {
    "names": [job.name for job in JOBS],
    "every_s": [float(job.every_s) for job in JOBS],
    "late_after_s": [float(job.late_after_s) for job in JOBS],
}
"""What the query `jobs_late` is asked with."""


@dataclass(frozen=True, slots=True)
class LateJob:
    """A periodic job that should have run. `late_s`: for how long it has been overdue; both None: it never ran."""

    name: str
    every_s: float
    last_at: datetime | None
    late_s: float | None


def late_jobs(database: Database) -> list[LateJob]:
    """Return the periodic jobs that did not run for three of their intervals, or 30 s where that is more.

    By the database's clock, and by claims: what a job does after its claim is its log's matter. One that never ran
    counts from the first migration, so a new installation has time to start its workers. Members join, leave and take
    over without any job; silent deaths, dead relays and cut-off route changes wait for their neighbours meanwhile.
    """
    with database.connection() as connection:
        rows = connection.execute(query("jobs_late"), LATE_FACTS).fetchall()
    return [LateJob(*row) for row in rows]
