"""The audit trail: acts of people and machines, newest first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, get_args

from mqlayer.errors import InvalidInput
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

ACTS_LIMIT: Final = 200
AuditedBy = Literal["people", "machines"]
"""People are actors with an @, as commands (user@host) and the console (user@console) name them."""


@dataclass(frozen=True, slots=True)
class AuditedAct:
    """An act. `actor`: by its own word, `role`: its Postgres role."""

    audit_id: int
    at: datetime
    actor: str
    role: str
    act: str
    object: str
    facts: Mapping[str, Any]

    @property
    def reason(self) -> str:
        """Return the actor's reason, if it gave one."""
        return str(self.facts.get("reason", ""))

    @property
    def by_person(self) -> bool:
        """Whether the actor is a person."""
        return "@" in self.actor


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Acts to show; None does not narrow. Texts are whole, times are from and before."""

    actor: str | None = None
    act: str | None = None
    object: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    who: AuditedBy | None = None


def audited_acts(
    database: Database, chosen: AuditFilter, *, before: tuple[datetime, int] | None = None, limit: int = 50
) -> list[AuditedAct]:
    """Return acts from before a time and number on. Raises InvalidInput."""
    if chosen.who not in (None, *get_args(AuditedBy)):
        raise InvalidInput(f"{chosen.who!r} acts nowhere: say people or machines")
    at, number = before or (None, None)
    facts = {
        "actor": chosen.actor, "act": chosen.act, "object": chosen.object, "since": chosen.since,
        "until": chosen.until, "who": chosen.who, "before_at": at, "before": number, "limit": limit,
    }  # fmt: skip
    with database.connection() as connection:
        # A plan for any filter would read all rows for a rare one.
        rows = connection.execute(query("audit_list"), facts, prepare=False).fetchall()
    return [AuditedAct(*row) for row in rows]


def audited_kinds(database: Database) -> list[str]:
    """Return the kinds of acts that the trail has."""
    with database.connection() as connection:
        return [act for (act,) in connection.execute(query("audit_acts"), {"limit": ACTS_LIMIT}).fetchall()]
