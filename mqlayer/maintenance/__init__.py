"""The periodic jobs; cleanup of partitions, marks, fence and inbox."""

from mqlayer.maintenance.fence_cleanup import clean_fence
from mqlayer.maintenance.inbox_cleanup import clean_inbox
from mqlayer.maintenance.jobs import PERIODIC_JOBS, PeriodicJob
from mqlayer.maintenance.late_jobs import LateJob, late_jobs
from mqlayer.maintenance.marks_cleanup import drop_closed_marks
from mqlayer.maintenance.trim import TrimReport, trim_pass

__all__ = [
    "PERIODIC_JOBS",
    "LateJob",
    "PeriodicJob",
    "TrimReport",
    "clean_fence",
    "clean_inbox",
    "drop_closed_marks",
    "late_jobs",
    "trim_pass",
]
