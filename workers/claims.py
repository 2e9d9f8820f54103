"""Claims of periodic jobs: one row per job in Postgres, so that two schedulers do no harm."""

from __future__ import annotations

from typing import Final

from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.workers.schedule import Job

EARLY: Final = 0.8
"""Part of the interval after which the job may be claimed again: schedulers tick a little early or late."""


def claimed(control: Database, job: Job) -> bool:
    """Claim the next run of a job, if it is due by the database's clock; say whether it is ours."""
    with control.connection() as connection:
        row = connection.execute(query("job_claim"), {"name": job.name, "every_s": job.every_s * EARLY}).fetchone()
    return row is not None
