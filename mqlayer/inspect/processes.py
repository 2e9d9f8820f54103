"""Relays, members and producers by their last sign of life in Postgres."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

_RELAY_ID: Final = re.compile(r"(.+)-(\d+)-[0-9a-f]{6}")


@dataclass(frozen=True, slots=True)
class RelayProcess:
    """A relay. `lp_sets`: those it holds, of 16; `sent_at`: None if it sent no message."""

    relay_id: str
    lease_until: datetime
    alive: bool
    lp_sets: int
    sent_at: datetime | None
    version: str
    protocol: int

    @property
    def process(self) -> tuple[str, int] | None:
        """Its host and pid, None if its id does not tell."""
        found = _RELAY_ID.fullmatch(self.relay_id)
        return None if found is None else (found[1], int(found[2]))

    def beat_at(self, lease_s: float) -> datetime:
        """Return its last sign of life, given the length of leases."""
        beat = self.lease_until - timedelta(seconds=lease_s)
        return beat if self.sent_at is None else max(beat, self.sent_at)


@dataclass(frozen=True, slots=True)
class MemberProcess:
    """A member of any group. `lease_until`: None once its end is recorded."""

    topic: str
    group: str
    group_id: int
    member_id: str
    host: str
    pid: int
    joined_at: datetime
    leaving: bool
    lease_until: datetime | None
    alive: bool
    version: str
    protocol: int

    @property
    def state(self) -> str:
        """In a word: a *silent* one did not leave."""
        if self.alive:
            return "leaving" if self.leaving else "running"
        return "left" if self.leaving else "silent"


@dataclass(frozen=True, slots=True)
class OpenSource:
    """An outbox or direct producer that may publish."""

    source_id: int
    kind: str
    name: str
    role: str
    opened_at: datetime


def relay_processes(database: Database, *, limit: int = 50) -> list[RelayProcess]:
    """Return relays of an application database, living ones first."""
    return [RelayProcess(*row) for row in _rows(database, "relay_list", limit=limit)]


def member_processes(
    database: Database, *, after_group: int = 0, after_member: str = "", limit: int = 50
) -> list[MemberProcess]:
    """Return members of all groups, from behind one on."""
    facts = {"after_group": after_group, "after_member": after_member, "limit": limit}
    return [MemberProcess(*row) for row in _rows(database, "member_list", **facts)]


def open_sources(database: Database, *, before: int | None = None, limit: int = 50) -> list[OpenSource]:
    """Return open sources, newest first, from before one on."""
    return [OpenSource(*row) for row in _rows(database, "source_list", before=before, limit=limit)]


def _rows(database: Database, name: str, **facts: Any) -> list[tuple[Any, ...]]:
    with database.connection() as connection:
        return connection.execute(query(name), facts).fetchall()
