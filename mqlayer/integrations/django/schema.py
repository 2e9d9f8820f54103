"""Install mqlayer's schemas where Django migrates."""

from __future__ import annotations

from typing import Any

from mqlayer.integrations.django.configuration import database_alias, dsn_of, is_of_tests, place_of
from mqlayer.postgres.migrations import migrate, migrate_for_tests
from mqlayer.settings import Settings


def install(_apps: Any, schema_editor: Any) -> None:
    """Bring the application schema of MQLAYER's database up to date; the control schema too where it belongs there.

    Safe to repeat. Raises as `mqlayer migrate` does.
    """
    connection = schema_editor.connection
    dsn = dsn_of(connection)
    if connection.alias != database_alias() or not dsn:
        return
    install_schema = migrate_for_tests if is_of_tests(connection) else migrate
    if place_of(Settings().dsn.get_secret_value()) == place_of(dsn):
        install_schema(dsn, schema="control")
    install_schema(dsn, schema="application")
