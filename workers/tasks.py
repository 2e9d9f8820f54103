"""Celery's tasks, one per periodic job: each claims its job and runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from celery import current_task

from mqlayer.errors import VersionRefused
from mqlayer.logs import event_logger
from mqlayer.maintenance.jobs import PERIODIC_JOBS, PeriodicJob
from mqlayer.workers.app import TASK_TIME_LIMIT_S, app
from mqlayer.workers.connections import presence, runtime
from mqlayer.workers.job_claims import run_when_due
from mqlayer.workers.schedule import task_name

log = event_logger(__name__)


def _end_worker(error: VersionRefused) -> None:
    """Shut this worker down: it would take tasks that newer ones can do."""
    worker = getattr(current_task, "request", None)
    log.error("code_too_old", extra={"reason": str(error)})
    if worker is not None and worker.hostname:
        app.control.shutdown(destination=[worker.hostname])


def _task(job: PeriodicJob) -> Any:
    def run() -> None:
        here = runtime()
        try:
            # Before the claim: code that is too old must not keep the job from others.
            with presence().working(TASK_TIME_LIMIT_S):
                run_when_due(here, job)
        except VersionRefused as error:
            _end_worker(error)
            raise

    run.__name__, run.__doc__ = job.name, job.run.__doc__
    return app.task(name=task_name(job))(run)


TASKS: Final[Mapping[str, Any]] = {job.name: _task(job) for job in PERIODIC_JOBS}
"""By the job's name."""
