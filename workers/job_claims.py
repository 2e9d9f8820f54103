"""Claims of periodic jobs, so that several schedulers do no harm: a row per job, or per job and application database.

A claim guards nothing: a worker stopped after its claim may run beside the next. `PERIODIC_JOBS` names each
job's fence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from mqlayer.errors import MqlayerError
from mqlayer.maintenance.jobs import PeriodicJob
from mqlayer.postgres.database import Database
from mqlayer.postgres.dsn import address_of
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime

# Part of the interval: schedulers tick a little early or late.
EARLY: Final = 0.8
ERROR_CHARACTERS: Final = 1_000


def claim_name(runtime: Runtime, job: PeriodicJob) -> str:
    """Return the name of a job's row."""
    address = address_of(runtime.settings.application_dsn())
    if not job.per_application or address == address_of(runtime.settings.control_dsn()):
        return job.name
    return f"{job.name}@{hashlib.sha256(address.encode()).hexdigest()[:12]}"


def claimed(control: Database, job: PeriodicJob, name: str = "") -> int | None:
    """Claim a job's next run; its number if it was due by the database's clock."""
    facts = {"name": name or job.name, "every_s": job.every_s * EARLY}
    with control.connection() as connection:
        row = connection.execute(query("job_claim"), facts).fetchone()
    return None if row is None else int(row[0])


def run_when_due(runtime: Runtime, job: PeriodicJob) -> bool:
    """Run a job unless another worker did; whether it was due."""
    name = claim_name(runtime, job)
    epoch = claimed(runtime.control, job, name)
    if epoch is None:
        return False
    with recorded(runtime.control, name, epoch):
        job.run(runtime, job.every_s)
    return True


@contextmanager
def recorded(control: Database, name: str, epoch: int) -> Iterator[None]:
    """Note the end of a run, and its error."""
    try:
        yield
    except Exception as error:
        _put(control, name, epoch, _text(error))
        raise
    _put(control, name, epoch, None)


def _put(control: Database, name: str, epoch: int, error: str | None) -> None:
    # A note for people: the run is as good without it.
    with suppress(MqlayerError), control.connection() as connection:
        connection.execute(query("job_ended"), {"name": name, "epoch": epoch, "error": error})


def _text(error: Exception) -> str:
    # Another library's message may hold a body.
    shown = f": {error}" if isinstance(error, MqlayerError) else ", see the worker's log"
    return f"{type(error).__name__}{shown}".replace("\0", "")[:ERROR_CHARACTERS]
