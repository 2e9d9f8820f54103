"""Route changes, planned and applied at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mqlayer.domain.routing import Route
from mqlayer.routes import apply_plan, finish_earlier, planned_merge, planned_move, planned_split
from mqlayer.runtime.runtime import Runtime


def split(runtime: Runtime, topic: str, partition: int, **options: Any) -> Route:
    """Split a partition, by the options of `planned_split`."""
    finish_earlier(runtime, topic)
    return apply_plan(runtime, planned_split(runtime, topic, partition, **options))


def merge(runtime: Runtime, topic: str, partitions: Sequence[int], **options: Any) -> Route:
    """Merge partitions, by the options of `planned_merge`."""
    finish_earlier(runtime, topic)
    return apply_plan(runtime, planned_merge(runtime.control, topic, partitions, **options))


def move(runtime: Runtime, topic: str, partition: int, **options: Any) -> Route:
    """Move a partition, by the options of `planned_move`."""
    finish_earlier(runtime, topic)
    return apply_plan(runtime, planned_move(runtime.control, topic, partition, **options))
