"""Run named queries on asyncpg connections; the package is not imported here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import psycopg

_PARAMETER: Final = re.compile(r"%\((\w+)\)[sbt](::jsonb)?|%%")


def recognises(connection: Any) -> bool:
    """Whether an object is an asyncpg connection, also one lent by a pool."""
    return _is_of_asyncpg(connection) and hasattr(connection, "is_in_transaction")


def numbered(text: str, parameters: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """Return a statement with $1, $2 … in place of named parameters, and their values."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return "%"
        if name not in names:
            names.append(name)
        # An application may have set a codec for jsonb, which would encode the text again.
        return f"${names.index(name) + 1}" + ("::text::jsonb" if match[2] else "")

    return _PARAMETER.sub(number, text), tuple([parameters[name] for name in names])


async def fetch_row(connection: Any, text: str, parameters: Mapping[str, Any]) -> tuple[Any, ...]:
    """Run a statement and return its one row."""
    statement, values = numbered(text, parameters)
    return tuple(await connection.fetchrow(statement, *values) or ())


def as_psycopg(error: BaseException | None) -> psycopg.Error | None:
    """Return psycopg's error for one of asyncpg's, or None."""
    if error is None or not _is_of_asyncpg(error):
        return None
    state = getattr(error, "sqlstate", None)
    if state is None:
        # What asyncpg itself refuses: a value of a wrong type, or a closed connection.
        return psycopg.DataError(str(error)) if isinstance(error, ValueError) else psycopg.InterfaceError(str(error))
    try:
        kind = psycopg.errors.lookup(state)
    except KeyError:
        kind = psycopg.DatabaseError
    found = kind(str(error))
    vars(found).update(sqlstate=state, hint=getattr(error, "hint", None))
    return found


def _is_of_asyncpg(found: Any) -> bool:
    return any(base.__module__.partition(".")[0] == "asyncpg" for base in type(found).__mro__)
