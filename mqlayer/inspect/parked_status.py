"""Parked messages and running replays, by Postgres' clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from mqlayer.domain.message import Identity
from mqlayer.domain.retry_rules import RetryRules
from mqlayer.domain.routing import Lp
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query


@dataclass(frozen=True, slots=True)
class ParkedCounts:
    """A group's parked messages. `waiting`: keys that need an operator."""

    keys: int = 0
    messages: int = 0
    waiting: int = 0
    since: datetime | None = None
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class ParkedKeyStatus:
    """A parked key. `due_in_s`: None if an operator must release it."""

    cause: str
    since: datetime
    due_at: datetime | None
    due_in_s: float | None
    attempts: int
    messages: int
    bytes: int
    head: Identity | None
    paused_at: datetime | None = None
    paused_by: str | None = None


@dataclass(frozen=True, slots=True)
class ReplayStatus:
    """A running replay or backfill. `newer_wait`: the streams pause meanwhile; `waiting`: sent, not handled yet."""

    replay_id: int
    kind: str
    newer_wait: bool
    sent: int
    at_batch: int
    upto_batch: int
    waiting: int
    since: datetime


def running_replays(database: Database, group_ids: Iterable[int]) -> Mapping[int, ReplayStatus]:
    """Return running replays by group id."""
    with database.connection() as connection:
        rows = connection.execute(query("inspected_replays"), {"group_ids": list(group_ids)}).fetchall()
    return {group_id: ReplayStatus(*facts) for group_id, *facts in rows}


def describe_full(rules: RetryRules, group: ParkedCounts, key: tuple[int, int] | None) -> str | None:
    """Return the limit that prevents parking, or None. `key`: its messages and bytes."""
    for what, there, limit, name in (
        ("the group", group.messages, rules.parked_messages_limit, "parked_messages_limit"),
        ("the group", group.bytes, rules.parked_bytes_limit, "parked_bytes_limit"),
        ("its key", key[0] if key else 0, rules.key_messages_limit, "key_messages_limit"),
        ("its key", key[1] if key else 0, rules.key_bytes_limit, "key_bytes_limit"),
    ):
        if there >= limit:
            unit = "bytes" if name.endswith("bytes_limit") else "messages"
            return f"{what} has {there:,} {unit} parked, and {name} is {limit:,}"
    return None


def parked_counts(database: Database, group_ids: Iterable[int]) -> Mapping[int, ParkedCounts]:
    """Return counts by group id."""
    with database.connection() as connection:
        rows = connection.execute(query("inspected_parked"), {"group_ids": list(group_ids)}).fetchall()
    return {group_id: ParkedCounts(*counts) for group_id, *counts in rows}


def parked_totals(database: Database, group_ids: Iterable[int]) -> Mapping[int, ParkedCounts]:
    """Return messages and bytes by group id, without their keys."""
    with database.connection() as connection:
        rows = connection.execute(query("inspected_parked_totals"), {"group_ids": list(group_ids)}).fetchall()
    return {group_id: ParkedCounts(messages=messages, bytes=size) for group_id, messages, size in rows}


def parked_heads(
    database: Database, heads: Iterable[tuple[int, int, bytes]]
) -> Mapping[tuple[int, int, bytes], tuple[int, int]]:
    """Return messages and bytes by group id, LP and key."""
    asked = list(heads)
    if not asked:
        return {}
    facts = {
        "group_ids": [group_id for group_id, _, _ in asked],
        "lps": [lp for _, lp, _ in asked],
        "names": [name for _, _, name in asked],
    }
    with database.connection() as connection:
        rows = connection.execute(query("inspected_parked_heads"), facts).fetchall()
    return {(group_id, lp, bytes(name)): (messages, size) for group_id, lp, name, messages, size in rows}


def parked_key(database: Database, group_id: int, lp: Lp, key: bytes) -> ParkedKeyStatus | None:
    """Return a key's parking, or None."""
    facts = {"group_id": group_id, "lp": int(lp), "name": key}
    with database.connection() as connection:
        row = connection.execute(query("inspected_parked_key"), facts).fetchone()
    if row is None:
        return None
    cause, since, due_at, due_in_s, attempts, messages, size, source, seq, paused_at, paused_by = row
    head = None if source is None else Identity(source, int(lp), seq)
    return ParkedKeyStatus(cause, since, due_at, due_in_s, attempts, messages, size, head, paused_at, paused_by)
