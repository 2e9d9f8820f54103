"""Audit rows of operators' acts (invariant 19)."""

from __future__ import annotations

from typing import Any

from psycopg.types.json import Jsonb

from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query


def write_audit(connection: Connection, actor: str, act: str, target: str, facts: dict[str, Any]) -> None:
    """Write an audit row in the act's transaction."""
    connection.execute(query("audit_insert"), {"actor": actor, "act": act, "object": target, "facts": Jsonb(facts)})
