"""Jobs that give messages to a group: rows of `mqlayer.redrive`.

Each batch is one transaction under the group's lock, and notes its place: each message is given once. An operator
takes over a job at once, the retry scan after its lease.
"""

from __future__ import annotations

import threading
import uuid
from typing import Any, Final, Literal, Protocol

from mqlayer.errors import Conflict
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime

LEASE_S: Final = 10.0
POLL_S: Final = 1.0
"""Longest wait between lease extensions."""

JobState = Literal["running", "done", "cancelled"]


class RedeliveryJob(Protocol):
    """A worker's kind of job."""

    def pause_s(self) -> float:
        """Return the seconds until it can give, apart from the rate."""

    def deliver(self) -> None:
        """Give the next batch, or end the job."""


def new_worker() -> str:
    """Return a unique worker name."""
    return uuid.uuid4().hex


def claim_abandoned(database: Database, job_id: int, worker: str) -> bool:
    """Take a running job without a lease; False if there is none."""
    facts = {"redrive_id": job_id, "worker": worker, "lease_s": LEASE_S, "instead": False}
    row = database.transaction(lambda connection: connection.execute(query("redrive_take"), facts).fetchone())
    return row is not None


def take_over(runtime: Runtime, job_id: int, *, act: str, over: Conflict, worker: str) -> None:
    """Take over a job, even from another worker; raise `over` if it is not running."""

    def work(connection: Connection) -> None:
        facts = {"redrive_id": job_id, "worker": worker, "lease_s": LEASE_S, "instead": True}
        if connection.execute(query("redrive_take"), facts).fetchone() is None:
            raise over
        write_audit(connection, runtime.actor, act, str(job_id), {})

    runtime.control.transaction(work)


def cancel(
    connection: Connection, job_id: int, *, act: str, over: Conflict, actor: str, facts: dict[str, Any] | None = None
) -> int:
    """Cancel a job in the caller's transaction; return its group's id; raise `over` if it is not running."""
    row = connection.execute(query("redrive_end"), {"redrive_id": job_id, "state": "cancelled", "gone": 0}).fetchone()
    if row is None:
        raise over
    write_audit(connection, actor, act, str(job_id), {"sent": row[2], "not_sent": row[3]} | (facts or {}))
    return int(row[1])


def extend_lease(database: Database, job_id: int, worker: str) -> float | None:
    """Return the rate's wait in seconds; None: over, or another worker's."""
    facts = {"redrive_id": job_id, "worker": worker, "lease_s": LEASE_S}
    row = database.transaction(lambda connection: connection.execute(query("redrive_keep"), facts).fetchone())
    return None if row is None else float(row[0])


def run_job(
    database: Database,
    job_id: int,
    job: RedeliveryJob,
    *,
    worker: str,
    stop: threading.Event | None = None,
    longest_wait_s: float = float("inf"),
) -> None:
    """Work until the job is over, another worker has it, or `stop` is set; then release the lease.

    Also ends if the rate demands a wait beyond `longest_wait_s`.
    """
    stop = stop or threading.Event()
    while not stop.is_set() and (rate_s := extend_lease(database, job_id, worker)) is not None:
        if rate_s > longest_wait_s:
            break
        pause_s = rate_s or job.pause_s()
        if pause_s == 0:
            job.deliver()
        else:
            stop.wait(min(pause_s, POLL_S))
    facts = {"redrive_id": job_id, "worker": worker}
    database.transaction(lambda connection: connection.execute(query("redrive_leave"), facts))
