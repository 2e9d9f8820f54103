"""Claims of periodic jobs: one row per job, so that several schedulers do no harm.

A claim guards nothing: a stopped worker may run beside the next. Each step's facts fence it:

- relay: the chain, LP sets by lease
- trim: each group's position, in the trimming script
- rotate_outbox: the slot's exclusive lock
- clean_fence, clean_attempts, clean_dedup, clean_inbox: rows by age
- clean_marks: closed sources
- repair_routes: the change's row and seal id
- rebalance: the group's lock, and epochs
- retry_scan: the redrive's row
- archive: the topic's lock and marks
- release_delayed, watch_versions: the message's or alarm's row
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
