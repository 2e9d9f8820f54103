"""What of groups and keys waits outside of the stream: numbers for people, by the control database's clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from mqlayer.domain.message import Identity
from mqlayer.domain.routing import Lp
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query


@dataclass(frozen=True, slots=True)
class ParkedCounts:
    """What a group has parked. `waiting`: keys that wait for an operator; `since`: when the oldest was parked."""

    keys: int = 0
    messages: int = 0
    waiting: int = 0
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class ParkedKeyStanding:
    """A parked key. `due_in_s`: until its head is tried, None where an operator has to say so; `head`: that message."""

    cause: str
    since: datetime
    due_at: datetime | None
    due_in_s: float | None
    attempts: int
    messages: int
    head: Identity | None


@dataclass(frozen=True, slots=True)
class ReplayStanding:
    """What a group is being given of the archive of its topic. `kind`: replay or backfill.

    `rests`: its streams rest till the end. `sent`: messages given; `at_batch` of `upto_batch`: how far it is in the
    archive; `waiting`: messages of it that are not handled.
    """

    replay_id: int
    kind: str
    rests: bool
    sent: int
    at_batch: int
    upto_batch: int
    waiting: int
    since: datetime


def running_replays(database: Database, group_ids: Iterable[int]) -> Mapping[int, ReplayStanding]:
    """Return what groups are being given of archives; nothing for the others."""
    with database.connection() as connection:
        rows = connection.execute(query("inspected_replays"), {"group_ids": list(group_ids)}).fetchall()
    return {group_id: ReplayStanding(*facts) for group_id, *facts in rows}


def parked_counts(database: Database, group_ids: Iterable[int]) -> Mapping[int, ParkedCounts]:
    """Return what groups have parked; nothing for those that have not."""
    with database.connection() as connection:
        rows = connection.execute(query("inspected_parked"), {"group_ids": list(group_ids)}).fetchall()
    return {group_id: ParkedCounts(*counts) for group_id, *counts in rows}


def parked_key(database: Database, group_id: int, lp: Lp, key: bytes) -> ParkedKeyStanding | None:
    """Return how a key is parked; None where it is not."""
    facts = {"group_id": group_id, "lp": int(lp), "name": key}
    with database.connection() as connection:
        row = connection.execute(query("inspected_parked_key"), facts).fetchone()
    if row is None:
        return None
    cause, since, due_at, due_in_s, attempts, messages, source, seq = row
    head = None if source is None else Identity(source, int(lp), seq)
    return ParkedKeyStanding(cause, since, due_at, due_in_s, attempts, messages, head)
