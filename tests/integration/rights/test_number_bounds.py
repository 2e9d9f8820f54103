"""Numbers and times: every column that publishers and consumers may write takes so much and no more.

Statements of jobs and lists add to these columns, or show them, over the rows of all groups: one value at the end of
its type would fail them for all.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any, Final

import psycopg
import pytest

from mqlayer.postgres.rights import Right
from tests.fixtures.roles import Roles

LIMITED: Final = [right for right in Right if right not in (Right.RELAY, Right.WORK, Right.OPERATE, Right.MIGRATE)]
"""Rights whose roles may harm no more than their own topics and groups."""
# What a role may write, but for references, which only take numbers that are there.
WRITTEN: Final = """
    SELECT n.nspname || '.' || k.relname, a.attname, format_type(a.atttypid, NULL)
    FROM pg_attribute a JOIN pg_class k ON k.oid = a.attrelid JOIN pg_namespace n ON n.oid = k.relnamespace
    JOIN pg_type t ON t.oid = a.atttypid
    WHERE n.nspname IN ('mqlayer', 'mqlayer_app', 'mqlayer_archive') AND k.relkind IN ('r', 'p')
      AND a.attnum > 0 AND NOT a.attisdropped AND t.typcategory IN ('N', 'D', 'T')
      AND NOT EXISTS (SELECT FROM pg_constraint c
                      WHERE c.conrelid = k.oid AND c.contype = 'f' AND a.attnum = ANY(c.conkey))
      AND (has_column_privilege(k.oid, a.attnum, 'INSERT') OR has_column_privilege(k.oid, a.attnum, 'UPDATE'))
    ORDER BY 1, 2"""
EXTREMES: Final[dict[str, list[str]]] = {
    "smallint": ["32767", "-32768"],
    "integer": ["2147483647", "-2147483648"],
    "bigint": ["9223372036854775807", "-9223372036854775808"],
    "double precision": ["1e300", "-1e300", "Infinity", "-Infinity", "NaN"],
    "timestamp with time zone": ["infinity", "-infinity", "4713-01-01 BC", "294276-12-31", "10000-01-01"],
}
USUAL: Final = dict.fromkeys(("smallint", "integer", "bigint", "double precision"), "1") | {
    "timestamp with time zone": "2026-01-01"
}
UNBOUNDED: Final = {
    ("mqlayer.member", "lease_until"): "-infinity, the only extreme that it takes, is for a member that is gone",
    ("mqlayer_archive.outcome_queue", "topic_id"): "the policy compares it with the group's",
    ("mqlayer_archive.outcome_queue", "group_id"): "the policy compares it with the role's groups",
    ("mqlayer_archive.outcome_queue", "partition_id"): "the policy compares its topic with the group's",
} | dict.fromkeys(
    [("mqlayer.node", "created_at"), ("mqlayer.partition", "created_at"), ("mqlayer_archive.topic", "last_pass_at")],
    "for locks of rows: the policy lets a consumer change nothing",
)


def written(dsn: str) -> set[tuple[str, str, str]]:
    """Table, column and type of all numbers and times that the role may write."""
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        return {(table, column, type_) for table, column, type_ in connection.execute(WRITTEN.encode())}


def copy(connection: psycopg.Connection[Any], table: str) -> None:
    """Make a table with the same columns and bounds, and no demand that another column be there."""
    connection.execute("DROP TABLE IF EXISTS tried")
    connection.execute(f"CREATE TEMP TABLE tried (LIKE {table} INCLUDING CONSTRAINTS)".encode())
    demands = "SELECT attname FROM pg_attribute WHERE attrelid = 'tried'::regclass AND attnum > 0 AND attnotnull"
    for (name,) in connection.execute(demands).fetchall():
        connection.execute(f'ALTER TABLE tried ALTER COLUMN "{name}" DROP NOT NULL'.encode())
    others = (
        "SELECT conname FROM pg_constraint WHERE conrelid = 'tried'::regclass AND pg_get_constraintdef(oid) !~ '[<>]='"
    )
    for (name,) in connection.execute(others).fetchall():
        connection.execute(f'ALTER TABLE tried DROP CONSTRAINT "{name}"'.encode())


def takes(connection: psycopg.Connection[Any], column: str, type_: str, value: str) -> bool:
    """Say whether the copy takes a row with this value alone."""
    try:
        with connection.transaction():
            connection.execute(f'INSERT INTO tried ("{column}") VALUES (%s::{type_})'.encode(), [value])
    except psycopg.errors.CheckViolation:
        return False
    return True


def test_every_number_and_time_that_a_limited_right_may_write_is_bounded(database_dsn: str, roles: Roles) -> None:
    found = set().union(*(written(roles.login(right)) for right in LIMITED))
    assert len(found) > 60
    unbounded = set()
    with closing(psycopg.connect(database_dsn, autocommit=True)) as connection:
        for table, column, type_ in sorted(found):
            copy(connection, table)
            assert takes(connection, column, type_, USUAL[type_]), (table, column)
            if any(takes(connection, column, type_, value) for value in EXTREMES[type_]):
                unbounded.add((table, column))
    assert unbounded == set(UNBOUNDED)


@pytest.mark.parametrize("column", ["version", "settings_version", "seek", "replay"])
def test_what_counts_one_by_one_has_room_for_the_next_one(database_dsn: str, column: str) -> None:
    """A statement over all groups adds one to each."""
    with closing(psycopg.connect(database_dsn, autocommit=True)) as connection:
        copy(connection, "mqlayer.consumer_group")
        assert takes(connection, column, "integer", "1000000000")
        assert not takes(connection, column, "integer", "1000000001")
