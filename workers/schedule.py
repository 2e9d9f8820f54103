"""The beat's schedule."""

from __future__ import annotations

from typing import Any

from mqlayer.maintenance.jobs import PERIODIC_JOBS, PeriodicJob


def task_name(job: PeriodicJob) -> str:
    """Return a job's task name."""
    return f"mqlayer.{job.name}"


def beat_schedule() -> dict[str, dict[str, Any]]:
    """Return the schedule; triggers expire after their interval."""
    return {
        job.name: {"task": task_name(job), "schedule": job.every_s, "options": {"expires": job.every_s}}
        for job in PERIODIC_JOBS
    }
