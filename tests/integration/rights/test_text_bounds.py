"""Texts, bytes and documents: every column that a right may write takes so much and no more."""

from __future__ import annotations

from contextlib import closing
from typing import Any, Final

import psycopg
import pytest

from mqlayer.postgres.rights import Right
from mqlayer.runtime.error_text import described
from tests.fixtures.roles import Roles

# What a role may write, of types whose values have no size of their own.
WRITTEN: Final = """
    SELECT n.nspname || '.' || k.relname, a.attname, format_type(a.atttypid, NULL)
    FROM pg_attribute a JOIN pg_class k ON k.oid = a.attrelid JOIN pg_namespace n ON n.oid = k.relnamespace
    JOIN pg_type t ON t.oid = a.atttypid
    WHERE n.nspname IN ('mqlayer', 'mqlayer_app', 'mqlayer_archive') AND k.relkind IN ('r', 'p')
      AND a.attnum > 0 AND NOT a.attisdropped AND t.typlen < 0
      AND (has_column_privilege(k.oid, a.attnum, 'INSERT') OR has_column_privilege(k.oid, a.attnum, 'UPDATE'))
    ORDER BY 1, 2"""
BODY_BOUND: Final = 16 * 1024 * 1024
BIG: Final = 2_000_000
"""Beyond all bounds but those of bodies."""
BOUNDS: Final = r"octet_length|cardinality|pg_column_size|= ANY \(ARRAY| ~\s"
"""What a check that bounds a value has in it."""
UNBOUNDED: Final = {
    ("mqlayer.seal", "marks"): "of all sources and LPs of a partition; relays and workers write what a node told",
    ("mqlayer_archive.outcome", "actor"): "a row that the archive refuses would hold up those of all groups",
    ("mqlayer_archive.outcome", "reason"): "as actor",
} | {
    ("mqlayer_archive.record", column): "of the partition: one that the archive refuses would hold up all behind it"
    for column in ("body", "headers", "key", "tags")
}


def written(dsn: str) -> set[tuple[str, str, str]]:
    """Table, column and type of all that the role may write."""
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        return {(table, column, type_) for table, column, type_ in connection.execute(WRITTEN.encode())}


def too_much(type_: str, size: int) -> list[Any]:
    """Values of a type that are too large."""
    text = "x" * size
    if type_ == "bytea":
        return [text.encode()]
    if type_ == "jsonb":
        return [f'"{text}"', f'{{"key": "{text}"}}', "[" + "1," * (size // 2) + "1]"]
    if type_ == "text[]":
        return [[text], ["x"] * (size // 4)]
    if type_ == "double precision[]":
        return [[1.0] * (size // 8)]
    assert type_ in {"text", "character varying"}, f"no large values are known of {type_}"
    return [text, "a" * size, "any:" + "a" * size]


def copy(connection: psycopg.Connection[Any], table: str) -> None:
    """Make a table with the same columns and checks of values, and no demand that another column be there."""
    connection.execute("DROP TABLE IF EXISTS tried")
    connection.execute(f"CREATE TEMP TABLE tried (LIKE {table} INCLUDING CONSTRAINTS)".encode())
    demands = "SELECT attname FROM pg_attribute WHERE attrelid = 'tried'::regclass AND attnum > 0 AND attnotnull"
    for (name,) in connection.execute(demands).fetchall():
        connection.execute(f'ALTER TABLE tried ALTER COLUMN "{name}" DROP NOT NULL'.encode())
    others = "SELECT conname FROM pg_constraint WHERE conrelid = 'tried'::regclass AND pg_get_constraintdef(oid) !~ %s"
    for (name,) in connection.execute(others, [BOUNDS]).fetchall():
        connection.execute(f'ALTER TABLE tried DROP CONSTRAINT "{name}"'.encode())


def takes(connection: psycopg.Connection[Any], column: str, type_: str, value: Any) -> bool:
    """Say whether the copy takes a row with this value alone."""
    try:
        with connection.transaction():
            connection.execute(f'INSERT INTO tried ("{column}") VALUES (%s::{type_})'.encode(), [value])
    except (psycopg.errors.CheckViolation, psycopg.errors.StringDataRightTruncation):
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_column_that_a_right_may_write_is_bounded_or_has_a_reason(database_dsn: str, roles: Roles) -> None:
    found = set().union(*(written(roles.login(right)) for right in Right if right is not Right.MIGRATE))
    assert len(found) > 80
    unbounded = set()
    with closing(psycopg.connect(database_dsn, autocommit=True)) as connection:
        for table, column, type_ in sorted(found):
            size = BODY_BOUND + 1 if column == "body" else BIG
            copy(connection, table)
            if any(takes(connection, column, type_, value) for value in too_much(type_, size)):
                unbounded.add((table, column))
    assert unbounded == set(UNBOUNDED)


def test_what_is_kept_of_an_exception_stays_below_the_bounds() -> None:
    """A member would send a reason that Postgres refuses for ever."""
    long = type("\u20ac" * 100_000, (Exception,), {})
    assert len(described(long("\u20ac" * 100_000)).encode()) <= 65_536
