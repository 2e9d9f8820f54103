"""Claims of periodic jobs: one row per job, so that several schedulers do no harm.

A claim guards nothing: a worker stopped after its claim may run beside the next. `PERIODIC_JOBS` names each
job's fence.
"""

from __future__ import annotations

from typing import Final

from mqlayer.maintenance.jobs import PeriodicJob
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

# Part of the interval: schedulers tick a little early or late.
EARLY: Final = 0.8


def claimed(control: Database, job: PeriodicJob) -> bool:
    """Claim a job's next run; True if it was due by the database's clock."""
    with control.connection() as connection:
        row = connection.execute(query("job_claim"), {"name": job.name, "every_s": job.every_s * EARLY}).fetchone()
    return row is not None
