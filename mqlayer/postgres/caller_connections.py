"""Run statements in callers' transactions: psycopg, asyncpg, SQLAlchemy, Django.

One generator serves both forms, sync and async: it yields statements, gets rows, returns the result; `run` or
`run_async` runs it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from mqlayer.errors import InvalidInput
from mqlayer.postgres import asyncpg_connections
from mqlayer.postgres.database import translate

_SET_ENCODING: Final = "ALTER ROLE … SET client_encoding = 'UTF8', or say so when you connect"


T = TypeVar("T")
Row: TypeAlias = tuple[Any, ...]


class Statement(NamedTuple):
    """A statement that returns one row. `in_transaction`: refuse it as a transaction of its own."""

    text: str
    parameters: Mapping[str, Any]
    in_transaction: bool = False


class Blocking(NamedTuple):
    """Work between statements that waits elsewhere."""

    work: Callable[[], None]


_databases_of_tests: Final[list[tuple[str, int]]] = []
"""Name and port of the databases that tests lend; while there are any, effects in another one are refused."""


class StandIn(ABC):
    """A session of tests, which answers statements itself."""

    asynchronous = False

    @abstractmethod
    def answer(self, statement: Statement) -> Row:
        """Return a statement's one row."""

    def transaction(self) -> Any:
        """Open a transaction, or a savepoint."""
        raise NotImplementedError


Statements: TypeAlias = Generator[Statement | Blocking, Row, T]


def run(connection: Any, statements: Statements[T]) -> T:
    """Run the generator's statements; return its result. Raises mqlayer's errors."""
    try:
        statement = next(statements)
        row: Row
        while True:
            if isinstance(statement, Blocking):
                statement.work()
                row = ()
            else:
                try:
                    row = run_one(connection, statement)
                except Exception as error:
                    own = _own_error(connection, error)
                    if own is None:
                        raise
                    raise own from error
            statement = statements.send(row)
    except StopIteration as end:
        result: T = end.value
        return result


async def run_async(connection: Any, statements: Statements[T]) -> T:
    """As `run`, on async connections and sessions."""
    if not _is_async(connection):
        raise InvalidInput(
            f"can't use a {type(connection).__name__}: give an async connection of psycopg, asyncpg or SQLAlchemy"
        )
    try:
        statement = next(statements)
        row: Row
        while True:
            if isinstance(statement, Blocking):
                await asyncio.to_thread(statement.work)
                row = ()
            else:
                with caller_errors(connection):
                    row = await run_one_async(connection, statement)
            statement = statements.send(row)
    except StopIteration as end:
        result: T = end.value
        return result


def run_one(connection: Any, statement: Statement) -> Row:
    """Run a statement and return its one row. Driver errors pass."""
    if isinstance(connection, psycopg.Connection):
        return _run_on_psycopg(connection, statement)
    if isinstance(connection, StandIn) and not connection.asynchronous:
        return connection.answer(statement)
    if statement.in_transaction:
        check_in_transaction(connection)
    with driver_cursor(connection) as cursor:
        _check_encoding(connection)
        cursor.execute(*arguments_on(connection, statement))
        row = cursor.fetchone()
    return tuple(row.values()) if isinstance(row, dict) else tuple(row)


def _run_on_psycopg(connection: psycopg.Connection[Any], statement: Statement) -> Row:
    # The checks as below, by libpq itself: they are a third of a fence's price otherwise.
    session = connection.pgconn
    alone = connection.autocommit and session.transaction_status == TransactionStatus.IDLE
    if statement.in_transaction and (alone or _databases_of_tests):
        check_in_transaction(connection)
    if session.parameter_status(b"client_encoding") == b"SQL_ASCII":
        raise _refused_encoding()
    cursor = connection.cursor(row_factory=psycopg.rows.tuple_row)
    return cursor.execute(statement.text, statement.parameters).fetchone() or ()


async def run_one_async(connection: Any, statement: Statement) -> Row:
    """As `run_one`, on async connections and sessions."""
    if isinstance(connection, StandIn):
        return connection.answer(statement)
    if hasattr(connection, "run_sync"):
        result: Row = await connection.run_sync(run_one, statement)
        return result
    if statement.in_transaction:
        check_in_transaction(connection)
    if asyncpg_connections.recognises(connection):
        return await asyncpg_connections.fetch_row(connection, statement.text, statement.parameters)
    _check_encoding(connection)
    async with connection.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
        await cursor.execute(statement.text, statement.parameters)
        row = await cursor.fetchone()
    return tuple(row or ())


def arguments_on(connection: Any, statement: Statement) -> tuple[str, Any]:
    """Return a statement and its parameters in the form that a connection's driver takes."""
    if _is_sqlalchemy(connection) and asyncpg_connections.recognises(_core_of(connection).connection.driver_connection):
        return asyncpg_connections.numbered(statement.text, statement.parameters)
    return statement.text, statement.parameters


def is_autocommit(core: Any) -> bool:
    """Whether a SQLAlchemy Connection is at the isolation level AUTOCOMMIT."""
    driver = core.connection.driver_connection
    # asyncpg has no such mode: SQLAlchemy's adapter keeps it.
    holder = core.connection.dbapi_connection if asyncpg_connections.recognises(driver) else driver
    return bool(getattr(holder, "autocommit", False))


def _is_async(connection: Any) -> bool:
    return (
        isinstance(connection, psycopg.AsyncConnection)
        or hasattr(connection, "run_sync")
        or asyncpg_connections.recognises(connection)
        or (isinstance(connection, StandIn) and connection.asynchronous)
    )


def _check_encoding(connection: Any) -> None:
    """Raise InvalidInput for SQL_ASCII, which returns text as bytes."""
    driver = driver_connection(connection)
    if asyncpg_connections.recognises(driver):
        # It says UTF8 whenever it connects.
        return
    if driver is not None and driver.info.parameter_status("client_encoding") == "SQL_ASCII":
        raise _refused_encoding()


def _refused_encoding() -> InvalidInput:
    return InvalidInput(f"client_encoding is SQL_ASCII: {_SET_ENCODING}")


def driver_connection(connection: Any) -> Any:
    """Return the driver's own connection, or None."""
    if _is_sqlalchemy(connection):
        return _core_of(connection).connection.driver_connection
    if isinstance(connection, psycopg.Connection | psycopg.AsyncConnection):
        return connection
    return getattr(connection, "connection", None)


def check_in_transaction(connection: Any) -> None:
    """Raise InvalidInput in autocommit: checks must commit with effects. In tests, also for another database."""
    if _databases_of_tests:
        _check_database(driver_connection(connection))
    if _is_alone(connection):
        raise InvalidInput(
            "no transaction is open, and this has to commit with the effect: use `with connection.transaction():`, "
            "Django's `atomic()`, or a SQLAlchemy engine without AUTOCOMMIT, around both"
        )


@contextmanager
def effects_only_in(place: tuple[str, int]) -> Iterator[None]:
    """For the block, refuse effects in other databases than this one, and those of outer blocks."""
    _databases_of_tests.append(place)
    try:
        yield
    finally:
        _databases_of_tests.remove(place)


def _check_database(driver: Any) -> None:
    if not isinstance(driver, psycopg.Connection | psycopg.AsyncConnection) or driver.closed:
        return
    if place_of(driver) not in _databases_of_tests:
        (there, its_port), (name, port) = place_of(driver), _databases_of_tests[-1]
        raise InvalidInput(
            f"the effect would go to database {there!r} on port {its_port}, but the test's is {name!r} on port {port}: "
            "have the handler take its connection by app.settings.application_dsn() when it runs, not at import"
        )


def place_of(driver: Any) -> tuple[str, int]:
    """Return name and port of a psycopg connection's database."""
    return driver.info.dbname, driver.info.port


def _is_alone(connection: Any) -> bool:
    if _is_sqlalchemy(connection):
        core = _core_of(connection)
        driver = core.connection.driver_connection
        # SQLAlchemy's transaction is none at the isolation level AUTOCOMMIT; with asyncpg, it begins with a statement.
        return is_autocommit(core) if asyncpg_connections.recognises(driver) else _is_alone(driver)
    if asyncpg_connections.recognises(connection):
        return not connection.is_in_transaction()
    if isinstance(connection, psycopg.Connection | psycopg.AsyncConnection):
        return connection.autocommit and connection.info.transaction_status is TransactionStatus.IDLE
    if hasattr(connection, "in_atomic_block") and hasattr(connection, "get_autocommit"):
        return bool(not connection.in_atomic_block and connection.get_autocommit())
    return False


def driver_cursor(connection: Any) -> Any:
    """Return the driver's cursor, as a context manager."""
    if isinstance(connection, psycopg.Connection):
        return connection.cursor(row_factory=psycopg.rows.tuple_row)
    if _is_sqlalchemy(connection):
        core = _core_of(connection)
        check_dialect(core.dialect.name)
        driver = core.connection.driver_connection
        # Inside run_sync only SQLAlchemy's own cursor may wait.
        return closing(core.connection.cursor()) if _is_async(driver) else driver_cursor(driver)
    if type(connection).__module__.startswith("django."):
        check_dialect(connection.vendor)
        return connection.cursor()
    if _is_async(connection):
        raise InvalidInput(f"a {type(connection).__name__} is asynchronous: use the call that is awaited, as apublish")
    raise InvalidInput(
        f"can't use a {type(connection).__name__}: give a psycopg 3 connection, a SQLAlchemy session on psycopg, "
        "or a Django database connection"
    )


def check_dialect(name: str) -> None:
    """Raise InvalidInput for another database than Postgres, by SQLAlchemy's or Django's name."""
    if name != "postgresql":
        raise InvalidInput(f"this is a connection to {name}: outbox, fence and inbox are in Postgres only")


def _is_sqlalchemy(connection: Any) -> bool:
    return type(connection).__module__.startswith("sqlalchemy.")


def _core_of(connection: Any) -> Any:
    return connection.connection() if callable(connection.connection) else connection


@contextmanager
def caller_errors(connection: Any) -> Iterator[None]:
    """Turn driver errors, also wrapped ones, into mqlayer's."""
    try:
        yield
    except Exception as error:
        own = _own_error(connection, error)
        if own is None:
            raise
        raise own from error


def _own_error(connection: Any, error: Exception) -> Exception | None:
    if isinstance(error, UnicodeEncodeError):
        return InvalidInput(f"the session's client_encoding can't hold a text: {_SET_ENCODING}")
    cause = driver_error_in(error)
    return None if cause is None else translate(cause, _address(connection))


def driver_error_in(error: BaseException) -> psycopg.Error | None:
    """Return the driver's error behind an error; one of asyncpg's as psycopg's."""
    original = getattr(error, "orig", None)
    for candidate in (error, original, error.__cause__, getattr(original, "__cause__", None)):
        if isinstance(candidate, psycopg.Error):
            return candidate
        if (found := asyncpg_connections.as_psycopg(candidate)) is not None:
            return found
    return None


def _address(connection: Any) -> str:
    if isinstance(connection, psycopg.Connection | psycopg.AsyncConnection) and not connection.closed:
        return f"postgres at {connection.info.host}:{connection.info.port}/{connection.info.dbname}"
    return "postgres"
