"""The last run of each periodic job, for people."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from mqlayer.maintenance.jobs import PERIODIC_JOBS
from mqlayer.maintenance.late_jobs import late_jobs
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

JobOutcome = Literal["never ran", "running", "done", "failed"]


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job's last run. `took_s`: until the last end."""

    name: str
    every_s: float
    is_late: bool
    last_at: datetime | None = None
    ended_at: datetime | None = None
    took_s: float | None = None
    error: str | None = None

    @property
    def next_at(self) -> datetime | None:
        """When the next run is due."""
        return None if self.last_at is None else self.last_at + timedelta(seconds=self.every_s)

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
        JobStatus(job.name, float(job.every_s), job.name in late, *found.get(job.name, ())) for job in PERIODIC_JOBS
    ]
    return sorted(jobs, key=lambda one: (not one.is_late, one.outcome != "failed", one.name))
