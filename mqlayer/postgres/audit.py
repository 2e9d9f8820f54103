"""Audit rows of operators' acts (invariant 19)."""

from __future__ import annotations

from typing import Any

from psycopg.types.json import Jsonb

from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query


class Actor(str):
    """An actor, and the reason of its act, which its audit rows keep."""

    __slots__ = ("reason",)
    reason: str

    def __new__(cls, name: str, reason: str = "") -> Actor:
        """Return an actor."""
        made = super().__new__(cls, name)
        made.reason = reason
        return made


def write_audit(connection: Connection, actor: str, act: str, target: str, facts: dict[str, Any]) -> None:
    """Write an audit row in the act's transaction."""
    if isinstance(actor, Actor) and actor.reason:
        facts = {"reason": actor.reason} | facts
    connection.execute(query("audit_insert"), {"actor": actor, "act": act, "object": target, "facts": Jsonb(facts)})
