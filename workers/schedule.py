"""Which periodic jobs there are, and how often each is due."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Job:
    """A periodic job: its task, and the interval in seconds at which it is due."""

    name: str
    every_s: float

    @property
    def task(self) -> str:
        """The task's name."""
        return f"mqlayer.{self.name}"


RELAY: Final = Job("relay", 10)
TRIM: Final = Job("trim", 10)
ROTATE_OUTBOX: Final = Job("rotate_outbox", 60)
CLEAN_FENCE: Final = Job("clean_fence", 300)
CLEAN_MARKS: Final = Job("clean_marks", 300)
REPAIR_ROUTES: Final = Job("repair_routes", 2)

JOBS: Final = (RELAY, TRIM, ROTATE_OUTBOX, CLEAN_FENCE, CLEAN_MARKS, REPAIR_ROUTES)


def beat_schedule() -> dict[str, dict[str, Any]]:
    """Return the schedule as Celery's beat wants it. A message that waited for more than an interval is dropped."""
    return {job.name: {"task": job.task, "schedule": job.every_s, "options": {"expires": job.every_s}} for job in JOBS}
