"""Right checks before a change, even where nothing would change."""

from __future__ import annotations

from mqlayer.postgres.database import Database
from mqlayer.postgres.rights import Right, SchemaName, require_change


def check_change(database: Database, *others: Right, schema: SchemaName = "control") -> None:
    """Raise PermissionDenied unless this role may operate or has another right."""
    with database.connection() as connection:
        require_change(connection, schema, *others)


def check_group_change(database: Database, topic: str | None = None, group: str | None = None) -> None:
    """Raise PermissionDenied unless this role may operate or consume (default: any group)."""
    with database.connection() as connection:
        require_change(connection, "control", group=f"{topic}/{group}" if topic and group else "")
