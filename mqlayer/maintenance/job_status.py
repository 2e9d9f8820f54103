"""The last run of each periodic job, for people."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from mqlayer.maintenance.jobs import PERIODIC_JOBS
from mqlayer.maintenance.late_jobs import late_jobs
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

JobOutcome = Literal["never ran", "running", "done", "failed"]


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job's last run, and when the next one is due. `took_s`: None while it runs."""

    name: str
    every_s: float
    last_at: datetime | None = None
    next_at: datetime | None = None
    ended_at: datetime | None = None
    took_s: float | None = None
    error: str | None = None
    is_late: bool = False

    @property
    def outcome(self) -> JobOutcome:
        """The end of the last run; a killed one stays *running* until the next."""
        if self.last_at is None:
            return "never ran"
        if self.ended_at is None or self.ended_at < self.last_at:
            return "running"
        return "failed" if self.error is not None else "done"


def job_statuses(database: Database) -> list[JobStatus]:
    """Return all periodic jobs, late ones first."""
    with database.connection() as connection:
        rows = connection.execute(query("health_jobs"), {"names": [job.name for job in PERIODIC_JOBS]}).fetchall()
    found = {row[0]: row[1:] for row in rows}
    late = {one.name for one in late_jobs(database)}
    jobs = [
        JobStatus(job.name, float(job.every_s), *found.get(job.name, ()), is_late=job.name in late)
        for job in PERIODIC_JOBS
    ]
    return sorted(jobs, key=lambda one: (not one.is_late, one.outcome != "failed", one.name))
