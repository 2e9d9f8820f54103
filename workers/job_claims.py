"""Claims of periodic jobs: one row per job in Postgres, so that two schedulers do no harm.

A claim saves work, it guards nothing: a worker that is stopped after its claim may run beside the next one. So the
row's epoch, which counts the runs, goes no further. Every step of every job is fenced by what it changes, and does
nothing where that was done or has moved on: the chain and LP sets by lease (relay), each group's position in the very
script that trims (trim), the slot's exclusive lock (rotate_outbox), rows by age (clean_fence), sources that are closed
for good (clean_marks), the change's row and seal id (repair_routes), the group's lock, and epochs of its own for
whatever changes hands (rebalance), a redrive's row (retry_scan), rows by age (clean_attempts, clean_dedup,
clean_inbox), the lock on a topic's archive and what its marks say (archive), the row of the message itself
(release_delayed) or of the alarm (watch_versions). To compare the claim's epoch besides would refuse steps that are
right.
"""

from __future__ import annotations

from typing import Final

from mqlayer.domain.jobs import PeriodicJob
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

EARLY: Final = 0.8
"""Part of the interval after which the job may be claimed again: schedulers tick a little early or late."""


def claimed(control: Database, job: PeriodicJob) -> bool:
    """Claim the next run of a job, if it is due by the database's clock; say whether it is ours."""
    with control.connection() as connection:
        row = connection.execute(query("job_claim"), {"name": job.name, "every_s": job.every_s * EARLY}).fetchone()
    return row is not None
