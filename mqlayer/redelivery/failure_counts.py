"""Counts of parked and dead messages per group, for metrics and alerts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query


@dataclass(frozen=True, slots=True)
class FailureCounts:
    """A group's present state and lifetime totals, from the control database.

    `waiting`: keys that wait for an operator; `full`: keys at a key's limit. `oldest_s`: since the oldest key was
    parked; `overdue_s`: since the first unstarted key was due. None: no such key.

    `totals` and `last_at`: by event kind (`mqlayer.Event`), over all processes, without kinds that never occurred;
    `paused`, `blocked` and `parking_full` are never included. `failed` and `timed_out` lag by tenths of a second, and a
    killed member loses its last ones.
    """

    group_id: int
    topic: str
    group: str
    keys: int
    waiting: int
    full: int
    messages: int
    bytes: int
    oldest_s: float | None
    overdue_s: float | None
    dead: int
    messages_limit: int
    bytes_limit: int
    key_messages_limit: int
    key_bytes_limit: int
    totals: Mapping[str, int]
    last_at: Mapping[str, datetime]


def failure_counts(database: Database, topic: str | None = None, group: str | None = None) -> list[FailureCounts]:
    """Return the counts of all groups, a topic's, or one group's."""
    with database.connection() as connection:
        groups = connection.execute(query("failure_groups"), {"topic": topic, "group": group}).fetchall()
        facts = {"group_ids": [row[0] for row in groups]}
        counts = connection.execute(query("failure_counts"), facts).fetchall()
    totals: dict[int, dict[str, int]] = {}
    last: dict[int, dict[str, datetime]] = {}
    for group_id, event, count, last_at in counts:
        totals.setdefault(group_id, {})[event] = count
        last.setdefault(group_id, {})[event] = last_at
    return [_counts(row, totals.get(row[0], {}), last.get(row[0], {})) for row in groups]


def _counts(row: Sequence[Any], totals: Mapping[str, int], last: Mapping[str, datetime]) -> FailureCounts:
    values: list[Any] = [*row, totals, last]
    return FailureCounts(*values)
