"""How much of groups is parked and dead, and how often what happened: for metrics and alerts of other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query


@dataclass(frozen=True, slots=True)
class FailureCounts:
    """What of a group waits now, and what happened ever, by the control database.

    Now: parked `keys`, those of them `waiting` for an operator and `full`, at a limit of their own; `messages` and
    `bytes` parked, and how much may be; `oldest_s`: for how long the oldest key is parked, `overdue_s`: for how long
    the first one has been due that nobody has begun with, None where there is none; `dead` messages.

    `totals`: by the words of `mqlayer.Event`, for ever, in any process; only those that ever came are there. They are
    counted in the transaction of what they count; `failed` and `timed_out` some tenths of a second later, and those of
    a member that is killed meanwhile are lost. `last_at`: when each came last. Of `paused`, `blocked` and
    `parking_full` members alone know.
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
    """Return the counts of groups: of all topics, of one, or of one group."""
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
