"""When the beat asks for each periodic job."""

from __future__ import annotations

from typing import Any

from mqlayer.domain.jobs import JOBS, PeriodicJob


def task_name(job: PeriodicJob) -> str:
    """Return the name of a job's task."""
    return f"mqlayer.{job.name}"


def beat_schedule() -> dict[str, dict[str, Any]]:
    """Return the schedule as Celery's beat wants it. A message that waited for more than an interval is dropped."""
    return {
        job.name: {"task": task_name(job), "schedule": job.every_s, "options": {"expires": job.every_s}} for job in JOBS
    }
