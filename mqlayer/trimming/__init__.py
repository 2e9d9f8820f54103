"""Trimming: drop what nobody needs any more, in partitions, of marks, at the fence and in the inbox."""

from mqlayer.trimming.fence import clean_fence
from mqlayer.trimming.inbox import clean_inbox
from mqlayer.trimming.marks import drop_closed_marks
from mqlayer.trimming.trimming import TrimReport, trim_pass

__all__ = ["TrimReport", "clean_fence", "clean_inbox", "drop_closed_marks", "trim_pass"]
