"""Trimming: drop what nobody needs any more, in partitions, of marks and at the fence."""

from mqlayer.trimming.fence import clean_fence
from mqlayer.trimming.marks import drop_closed_marks
from mqlayer.trimming.trimming import TrimReport, trim_pass

__all__ = ["TrimReport", "clean_fence", "drop_closed_marks", "trim_pass"]
