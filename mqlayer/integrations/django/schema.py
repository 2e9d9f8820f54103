"""Install mqlayer's schemas where Django migrates."""

from __future__ import annotations

from typing import Any

from mqlayer.integrations.django.configuration import database_alias, dsn_of
from mqlayer.postgres.migrations import migrate
from mqlayer.settings import Settings


def install(_apps: Any, schema_editor: Any) -> None:
    """Bring the application schema of MQLAYER's database up to date; the control schema too where it belongs there.

    Safe to repeat. Raises as `mqlayer migrate` does.
    """
    connection = schema_editor.connection
    dsn = dsn_of(connection)
    if connection.alias != database_alias() or not dsn:
        return
    if Settings().dsn.get_secret_value() == dsn:
        migrate(dsn, schema="control")
    migrate(dsn, schema="application")
