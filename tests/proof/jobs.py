"""The periodic jobs by name, for tests."""

from __future__ import annotations

from typing import Final

from mqlayer.maintenance.jobs import PERIODIC_JOBS, PeriodicJob

BY_NAME: Final = {job.name: job for job in PERIODIC_JOBS}


def idle_job(name: str, every_s: float) -> PeriodicJob:
    """Return a job that does nothing."""
    return PeriodicJob(name, every_s, lambda _runtime, _every_s: None, "it changes nothing")
