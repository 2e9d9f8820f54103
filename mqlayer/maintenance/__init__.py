"""Cleanup of partitions, marks, fence and inbox."""

from mqlayer.maintenance.fence_cleanup import clean_fence
from mqlayer.maintenance.inbox_cleanup import clean_inbox
from mqlayer.maintenance.marks_cleanup import drop_closed_marks
from mqlayer.maintenance.trim import TrimReport, trim_pass

__all__ = ["TrimReport", "clean_fence", "clean_inbox", "drop_closed_marks", "trim_pass"]
