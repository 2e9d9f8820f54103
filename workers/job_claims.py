"""Claims of periodic jobs: one row per job, so that several schedulers do no harm.

A claim guards nothing: a worker stopped after its claim may run beside the next. `PERIODIC_JOBS` names each
job's fence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from mqlayer.errors import MqlayerError
from mqlayer.maintenance.jobs import PeriodicJob
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

# Part of the interval: schedulers tick a little early or late.
EARLY: Final = 0.8
ERROR_CHARACTERS: Final = 1_000


def claimed(control: Database, job: PeriodicJob) -> int | None:
    """Claim a job's next run; its number if it was due by the database's clock."""
    with control.connection() as connection:
        row = connection.execute(query("job_claim"), {"name": job.name, "every_s": job.every_s * EARLY}).fetchone()
    return None if row is None else int(row[0])


@contextmanager
def recorded(control: Database, job: PeriodicJob, epoch: int) -> Iterator[None]:
    """Note the end of a run, and its error."""
    try:
        yield
    except Exception as error:
        _put(control, job, epoch, _text(error))
        raise
    _put(control, job, epoch, None)


def _put(control: Database, job: PeriodicJob, epoch: int, error: str | None) -> None:
    # A note for people: the run is as good without it.
    with suppress(MqlayerError), control.connection() as connection:
        connection.execute(query("job_ended"), {"name": job.name, "epoch": epoch, "error": error})


def _text(error: Exception) -> str:
    # Another library's message may hold a body.
    shown = f": {error}" if isinstance(error, MqlayerError) else ", see the worker's log"
    return f"{type(error).__name__}{shown}".replace("\0", "")[:ERROR_CHARACTERS]
