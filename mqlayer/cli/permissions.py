"""The right that a command asks for before it changes something.

Postgres refuses each statement that a role may not run; a command that finds nothing to do runs none of them.
"""

from __future__ import annotations

from mqlayer.postgres.database import Database
from mqlayer.postgres.rights import Right, SchemaName, require_change


def check_change(database: Database, *others: Right, schema: SchemaName = "control") -> None:
    """Raise PermissionDenied unless this role may operate, or has one of the other rights."""
    with database.connection() as connection:
        require_change(connection, schema, *others)


def check_group_change(database: Database, topic: str | None = None, group: str | None = None) -> None:
    """Raise PermissionDenied unless this role may operate, or consume this group; without names, any group."""
    with database.connection() as connection:
        require_change(connection, "control", group=f"{topic}/{group}" if topic and group else "")
