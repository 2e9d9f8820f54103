"""The audit trail: acts of operators, newest first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

ACTS_LIMIT: Final = 200


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


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Acts to show; None does not narrow. Texts are whole, times are from and before."""

    actor: str | None = None
    act: str | None = None
    object: str | None = None
    since: datetime | None = None
    until: datetime | None = None


def audited_acts(
    database: Database, chosen: AuditFilter, *, before: tuple[datetime, int] | None = None, limit: int = 50
) -> list[AuditedAct]:
    """Return acts from before a time and number on."""
    at, number = before or (None, None)
    facts = {
        "actor": chosen.actor, "act": chosen.act, "object": chosen.object, "since": chosen.since,
        "until": chosen.until, "before_at": at, "before": number, "limit": limit,
    }  # fmt: skip
    with database.connection() as connection:
        # A plan for any filter would read all rows for a rare one.
        rows = connection.execute(query("audit_list"), facts, prepare=False).fetchall()
    return [AuditedAct(*row) for row in rows]


def audited_kinds(database: Database) -> list[str]:
    """Return the kinds of acts that the trail has."""
    with database.connection() as connection:
        return [act for (act,) in connection.execute(query("audit_acts"), {"limit": ACTS_LIMIT}).fetchall()]
