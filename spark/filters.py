"""Spark's filters as conditions in SQL: what Postgres judges as Spark would, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from psycopg import sql
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
)

from mqlayer.archiving.tables import COLUMNS, Table

COMPARED: Final[Mapping[type[Filter], str]] = {
    EqualTo: "=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}


def condition(one: Filter, table: Table) -> str | None:
    """Return a filter as a condition on the columns as they are stored; None where Spark has to judge it."""
    name = _column(one, table)
    if name is None:
        return None
    word = COLUMNS[table][name]
    if isinstance(one, IsNull | IsNotNull):
        return f'"{name}" IS {"NOT " if isinstance(one, IsNotNull) else ""}NULL'
    if isinstance(one, In):
        values = [_literal(name, word, value) for value in one.value if value is not None]
        return None if None in values or not values else f'"{name}" IN ({", ".join(filter(None, values))})'
    sign = COMPARED.get(type(one))
    # Texts are ordered by the database's collation, in Spark by their bytes.
    if sign is None or (word == "string" and sign != "="):
        return None
    value = _literal(name, word, getattr(one, "value", None))
    return None if value is None else f'"{name}" {sign} {value}'


def _column(one: Filter, table: Table) -> str | None:
    path = getattr(one, "attribute", ())
    return path[0] if len(path) == 1 and path[0] in COLUMNS[table] else None


def _literal(name: str, word: str, value: Any) -> str | None:
    """Return a value as SQL; None for what is not compared there."""
    if word in ("int", "bigint") and isinstance(value, int):
        return str(int(value))
    if word == "timestamp" and isinstance(value, datetime):
        # Without a zone, Spark means this process's; that is what the value was made from.
        return sql.Literal(value.astimezone(UTC).isoformat()).as_string() + "::timestamptz"
    if word == "string" and isinstance(value, str) and "\0" not in value:
        # Keys are stored as their UTF-8.
        return f"'\\x{value.encode().hex()}'::bytea" if name == "key" else sql.Literal(value).as_string()
    return None
