"""Trimming: drop what nobody needs any more, in partitions and at the fence."""

from mqlayer.trimming.fence import clean_fence
from mqlayer.trimming.trimming import TrimReport, trim_pass

__all__ = ["TrimReport", "clean_fence", "trim_pass"]
