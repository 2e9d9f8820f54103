"""Texts, bytes and documents: every column that a right may write takes so much and no more."""

from __future__ import annotations

from contextlib import closing
from typing import Any, Final

import psycopg
import pytest

from mqlayer.postgres.rights import Right
from mqlayer.runtime.error_text import ErrorTexts
from tests.fixtures.column_bounds import SIZED_BY_VALUE, ColumnCopy, by_table, written_columns

BODY_BOUND: Final = 16 * 1024 * 1024
BIG: Final = 1_100_000
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
    if type_ == "integer[]":
        return [[2**30] * (size // 8)]
    if type_ == "bigint[]":
        return [[2**40] * (size // 8)]
    assert type_ in {"text", "character varying"}, f"no large values are known of {type_}"
    return [text, "a" * size, "any:" + "a" * size]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_column_that_a_right_may_write_is_bounded_or_has_a_reason(database_dsn: str) -> None:
    found = written_columns(database_dsn, [right for right in Right if right is not Right.MIGRATE], SIZED_BY_VALUE)
    assert len(found) > 80
    unbounded = set()
    with closing(psycopg.connect(database_dsn, autocommit=True)) as connection:
        for table, columns in by_table(found):
            copy = ColumnCopy(connection, table, checks=BOUNDS)
            for _, column, type_ in columns:
                size = BODY_BOUND + 1 if column == "body" else BIG
                if any(copy.takes(column, type_, value) for value in too_much(type_, size)):
                    unbounded.add((table, column))
    assert unbounded == set(UNBOUNDED)


def test_what_is_kept_of_an_exception_stays_below_the_bounds() -> None:
    """A member would send a reason that Postgres refuses for ever."""
    long = type("\u20ac" * 100_000, (Exception,), {})
    assert len(ErrorTexts().text(long("\u20ac" * 100_000)).encode()) <= 65_536
