"""Run statements in callers' transactions: psycopg, SQLAlchemy, Django.

One generator serves both forms, sync and async: it yields statements, gets rows, returns the result; `run` or
`run_async` runs it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from mqlayer.errors import InvalidInput
from mqlayer.postgres.database import translate

_SET_ENCODING: Final = "ALTER ROLE … SET client_encoding = 'UTF8', or say so when you connect"


T = TypeVar("T")
Row: TypeAlias = tuple[Any, ...]


class Statement(NamedTuple):
    """A statement that returns one row. `in_transaction`: refuse it as a transaction of its own."""

    text: str
    parameters: Mapping[str, Any]
    in_transaction: bool = False


Statements: TypeAlias = Generator[Statement, Row, T]


def run(connection: Any, statements: Statements[T]) -> T:
    """Run the generator's statements; return its result. Raises mqlayer's errors."""
    try:
        statement = next(statements)
        while True:
            with caller_errors(connection):
                row = run_one(connection, statement)
            statement = statements.send(row)
    except StopIteration as end:
        result: T = end.value
        return result


async def run_async(connection: Any, statements: Statements[T]) -> T:
    """As `run`, on async connections and sessions."""
    if not isinstance(connection, psycopg.AsyncConnection) and not hasattr(connection, "run_sync"):
        raise InvalidInput(f"can't use a {type(connection).__name__}: give a psycopg or SQLAlchemy async connection")
    try:
        statement = next(statements)
        while True:
            with caller_errors(connection):
                row = await run_one_async(connection, statement)
            statement = statements.send(row)
    except StopIteration as end:
        result: T = end.value
        return result


def run_one(connection: Any, statement: Statement) -> Row:
    """Run a statement and return its one row. Driver errors pass."""
    if statement.in_transaction:
        check_in_transaction(connection)
    with driver_cursor(connection) as cursor:
        _check_encoding(connection)
        cursor.execute(statement.text, statement.parameters)
        row = cursor.fetchone()
    return tuple(row.values()) if isinstance(row, dict) else tuple(row)


async def run_one_async(connection: Any, statement: Statement) -> Row:
    """As `run_one`, on async connections and sessions."""
    if not isinstance(connection, psycopg.AsyncConnection):
        result: Row = await connection.run_sync(run_one, statement)
        return result
    if statement.in_transaction:
        check_in_transaction(connection)
    _check_encoding(connection)
    async with connection.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
        await cursor.execute(statement.text, statement.parameters)
        row = await cursor.fetchone()
    return tuple(row or ())


def _check_encoding(connection: Any) -> None:
    """Raise InvalidInput for SQL_ASCII, which returns text as bytes."""
    driver = driver_connection(connection)
    if driver is not None and driver.info.parameter_status("client_encoding") == "SQL_ASCII":
        raise InvalidInput(f"client_encoding is SQL_ASCII: {_SET_ENCODING}")


def driver_connection(connection: Any) -> Any:
    """Return the driver's own connection, or None."""
    if _is_sqlalchemy(connection):
        return _core_of(connection).connection.driver_connection
    if isinstance(connection, psycopg.Connection | psycopg.AsyncConnection):
        return connection
    return getattr(connection, "connection", None)


def check_in_transaction(connection: Any) -> None:
    """Raise InvalidInput in autocommit: checks must commit with effects."""
    if _is_sqlalchemy(connection):
        # SQLAlchemy's transaction is none at the isolation level AUTOCOMMIT.
        connection = _core_of(connection).connection.driver_connection
    if isinstance(connection, psycopg.Connection | psycopg.AsyncConnection):
        alone = connection.autocommit and connection.info.transaction_status is TransactionStatus.IDLE
    elif hasattr(connection, "in_atomic_block") and hasattr(connection, "get_autocommit"):
        alone = not connection.in_atomic_block and connection.get_autocommit()
    else:
        alone = False
    if alone:
        raise InvalidInput(
            "no transaction is open, and this has to commit with the effect: use `with connection.transaction():`, "
            "or Django's `atomic()`, around both"
        )


def driver_cursor(connection: Any) -> Any:
    """Return a psycopg cursor, as a context manager."""
    if isinstance(connection, psycopg.Connection):
        return connection.cursor(row_factory=psycopg.rows.tuple_row)
    if _is_sqlalchemy(connection):
        core = _core_of(connection)
        driver = core.connection.driver_connection
        # Inside run_sync only SQLAlchemy's own cursor may wait.
        return (
            closing(core.connection.cursor()) if isinstance(driver, psycopg.AsyncConnection) else driver_cursor(driver)
        )
    if type(connection).__module__.startswith("django."):
        return connection.cursor()
    raise InvalidInput(
        f"can't use a {type(connection).__name__}: give a psycopg 3 connection, a SQLAlchemy session on psycopg, "
        "or a Django database connection"
    )


def _is_sqlalchemy(connection: Any) -> bool:
    return type(connection).__module__.startswith("sqlalchemy.")


def _core_of(connection: Any) -> Any:
    return connection.connection() if callable(connection.connection) else connection


@contextmanager
def caller_errors(connection: Any) -> Iterator[None]:
    """Turn driver errors, also wrapped ones, into mqlayer's."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidInput(f"the session's client_encoding can't hold a text: {_SET_ENCODING}") from error
    except Exception as error:
        cause = driver_error_in(error)
        if cause is None:
            raise
        raise translate(cause, _address(connection)) from error


def driver_error_in(error: BaseException) -> psycopg.Error | None:
    """Return the driver's error behind an error."""
    for candidate in (error, getattr(error, "orig", None), error.__cause__):
        if isinstance(candidate, psycopg.Error):
            return candidate
    return None


def _address(connection: Any) -> str:
    if isinstance(connection, psycopg.Connection | psycopg.AsyncConnection) and not connection.closed:
        return f"postgres at {connection.info.host}:{connection.info.port}/{connection.info.dbname}"
    return "postgres"
