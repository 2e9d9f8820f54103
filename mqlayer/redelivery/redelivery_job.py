"""Jobs that give messages to a group: who works on one, and for how long.

A job is a row of `mqlayer.redrive`: dead messages that are given back (`redriving`), or what the archive holds
(`replaying`). Whoever works on it has a lease on it and gives batch by batch, each in one transaction that holds the
group's lock and the row, and notes the place that was come to. So a message is given once, however many work on it and
wherever they die: what was committed is behind the place, what was not is before it.

States: *running* -> *done* or *cancelled*, both for good. A running job whose worker died is gone on with by an
operator's word at once, or by the retry scan once the lease ran out.
"""

from __future__ import annotations

import threading
import uuid
from typing import Any, Final, Literal, Protocol

from mqlayer.errors import Conflict
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query

LEASE_S: Final = 10.0
POLL_S: Final = 1.0
"""How often whoever waits for the rate looks whether it was cancelled."""

JobState = Literal["running", "done", "cancelled"]


class RedeliveryJob(Protocol):
    """What one kind of job does, for one worker."""

    def pause_s(self) -> float:
        """Return for how many seconds nothing can be given, whatever the rate."""

    def deliver(self) -> None:
        """Give the next batch, in one transaction; end the job where there is nothing more."""


def new_worker() -> str:
    """Return a name for whoever is to work on a job, which nobody else has."""
    return uuid.uuid4().hex


def claim_abandoned(database: Database, job_id: int, worker: str) -> bool:
    """Begin to work on a job that nobody works on; False where somebody does, or it is over."""
    facts = {"redrive_id": job_id, "worker": worker, "lease_s": LEASE_S, "instead": False}
    row = database.transaction(lambda connection: connection.execute(query("redrive_take"), facts).fetchone())
    return row is not None


def take_over(database: Database, job_id: int, *, act: str, over: Conflict, actor: str, worker: str) -> None:
    """Take a running job over, whoever works on it; raise `over` where it is not running any more."""

    def work(connection: Connection) -> None:
        facts = {"redrive_id": job_id, "worker": worker, "lease_s": LEASE_S, "instead": True}
        if connection.execute(query("redrive_take"), facts).fetchone() is None:
            raise over
        write_audit(connection, actor, act, str(job_id), {})

    database.transaction(work)


def cancel(
    connection: Connection, job_id: int, *, act: str, over: Conflict, actor: str, facts: dict[str, Any] | None = None
) -> int:
    """End a running job in the caller's transaction; return its group. Raises `over` where it is not running."""
    row = connection.execute(query("redrive_end"), {"redrive_id": job_id, "state": "cancelled", "gone": 0}).fetchone()
    if row is None:
        raise over
    write_audit(connection, actor, act, str(job_id), {"sent": row[2], "not_sent": row[3]} | (facts or {}))
    return int(row[1])


def extend_lease(database: Database, job_id: int, worker: str) -> float | None:
    """Extend the lease; return for how many seconds the rate has it wait. None: over, or another worker's."""
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
    """Work on a job until it is over, somebody else has it, or `stop` is set.

    `worker` has its lease. Where it is stopped it leaves the lease, so that anybody goes on at once; also where the
    rate has it wait for longer than `longest_wait_s`.
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
