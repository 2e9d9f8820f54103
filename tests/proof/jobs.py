"""The periodic jobs by name, for tests."""

from __future__ import annotations

from typing import Final

from mqlayer.maintenance.jobs import JOBS, Job

BY_NAME: Final = {job.name: job for job in JOBS}


def idle_job(name: str, every_s: float) -> Job:
    """Return a job that does nothing."""
    return Job(name, every_s, lambda _runtime, _every_s: None)
