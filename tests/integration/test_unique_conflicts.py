"""What two insert at once ends in what ON CONFLICT says, whichever unique index they meet at.

An insert with a target after ON CONFLICT waits for the other only at that index, and fails at another one.
So an insert into a table with several keys that a caller can choose names no target.
"""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest

ROOT = Path(__file__).parents[2]
WITH_TARGET = re.compile(r"INSERT INTO (mqlayer\w*\.\w+)[^;]*?ON CONFLICT \(", re.DOTALL)
CHOSEN_KEYS = """
    SELECT i.indrelid::regclass::text, count(*) FROM pg_index i
    WHERE i.indisunique AND i.indrelid::regclass::text ~ '^mqlayer' AND NOT EXISTS (
        SELECT FROM pg_attribute a
        WHERE a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey::int2[]) AND a.attidentity <> '')
    GROUP BY 1
"""
SOURCES = [*ROOT.glob("sql/queries/*.sql"), *ROOT.glob("sql/migrations/*/*.sql")]


@pytest.fixture
def chosen_keys(database_dsn: str) -> dict[str, int]:
    """How many unique indexes of a table hold only what callers choose."""
    with psycopg.connect(database_dsn) as connection:
        return dict(connection.execute(CHOSEN_KEYS).fetchall())


def test_an_insert_names_a_conflict_s_target_only_where_there_is_one(chosen_keys: dict[str, int]) -> None:
    assert chosen_keys["mqlayer_app.topic"] == 2
    tables = {table for source in SOURCES for table in WITH_TARGET.findall(source.read_text("utf-8"))}
    assert {"mqlayer.node", "mqlayer.topic"} <= tables
    assert {table for table in tables if chosen_keys.get(table, 0) > 1} == set()
