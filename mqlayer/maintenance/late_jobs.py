"""Overdue periodic jobs, for health checks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from mqlayer.maintenance.jobs import PERIODIC_JOBS
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

LATE_FACTS: Final[dict[str, list[str] | list[float]]] = {
    "names": [job.name for job in PERIODIC_JOBS],
    "every_s": [float(job.every_s) for job in PERIODIC_JOBS],
    "late_after_s": [float(job.late_after_s) for job in PERIODIC_JOBS],
}


@dataclass(frozen=True, slots=True)
class LateJob:
    """An overdue job; `last_at` and `late_s` are None if it never ran."""

    name: str
    every_s: float
    last_at: datetime | None
    late_s: float | None


def late_jobs(database: Database) -> list[LateJob]:
    """Return jobs that were not claimed for three intervals, at least 30 s, by the database's clock.

    A job that never ran counts from the first migration.
    """
    with database.connection() as connection:
        rows = connection.execute(query("jobs_late"), LATE_FACTS).fetchall()
    return [LateJob(*row) for row in rows]
