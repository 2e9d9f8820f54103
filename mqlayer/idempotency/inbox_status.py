"""Reads the inbox."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

COUNT_LIMIT: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class InboxStats:
    """A group's rows; `messages`: at most 1,000,000."""

    group_id: int
    messages: int
    oldest_at: datetime
    newest_at: datetime


@dataclass(frozen=True, slots=True)
class AppliedEffect:
    """A recorded effect."""

    group_id: int
    id: str
    source: int
    lp: int
    seq: int
    applied_at: datetime


def inbox_stats(application: Database) -> list[InboxStats]:
    """Return statistics by group."""
    with application.connection() as connection:
        rows = connection.execute(query("inbox_stats"), {"limit": COUNT_LIMIT}).fetchall()
    return [InboxStats(*row) for row in rows]


def find_effect(application: Database, group_id: int, id_: str) -> AppliedEffect | None:
    """Return the effect of a message (source:lp:seq) or name ('=' + name), with '@<replay>/' before it for replays."""
    with application.connection() as connection:
        row = connection.execute(query("inbox_find"), {"group_id": group_id, "id": id_}).fetchone()
    return None if row is None else AppliedEffect(*row)
