"""Counts of failure events per group; words: `mqlayer.events`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import columns, query

BY_OPERATORS: Final = 0
"""Instead of a partition: operators and jobs."""


def add_counts(connection: Connection, group: Mapping[str, object], counts: Mapping[int, Mapping[str, int]]) -> None:
    """Add a group's counts by partition and event, in the caller's transaction."""
    rows = [
        (partition, event, count) for partition, events in counts.items() for event, count in events.items() if count
    ]
    if rows:
        facts = {"group_id": group["group_id"]} | columns(("partitions", "events", "counts"), rows)
        connection.execute(query("failure_counts_add"), facts)
