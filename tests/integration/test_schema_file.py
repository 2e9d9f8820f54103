"""sql/schema.sql shows the schemas as the migrations make them."""

from __future__ import annotations

import difflib

import pytest
from psycopg import sql

from mqlayer.postgres.database import connect
from tests.fixtures.schema_text import FILE, schema_text


def changed(dsn: str) -> str:
    """Return how the file differs from a migrated database; empty where it does not."""
    made, shown = schema_text(dsn).splitlines(), FILE.read_text("utf-8").splitlines()
    return "\n".join(difflib.unified_diff(shown, made, "sql/schema.sql", "the server", lineterm="", n=1))


def test_the_file_shows_what_the_migrations_make(database_dsn: str) -> None:
    assert not changed(database_dsn), "scripts/schema writes it anew"


@pytest.mark.usefixtures("new_sessions")
def test_the_text_is_the_same_whatever_a_database_sets(database_dsn: str) -> None:
    settings = {"TimeZone": "Asia/Tokyo", "DateStyle": "German", "search_path": "mqlayer, public"}
    with connect(database_dsn) as connection:
        for name, value in settings.items():
            text = sql.SQL("ALTER DATABASE {} SET {} = {}")
            connection.execute(text.format(sql.Identifier(connection.info.dbname), sql.SQL(name), value))
    assert not changed(database_dsn)
