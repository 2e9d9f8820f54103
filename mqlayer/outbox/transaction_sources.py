"""Open a transaction where an application keeps its connections: a session factory, an engine, a pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, Final, Protocol

from psycopg_pool import AsyncConnectionPool, ConnectionPool

from mqlayer.errors import InvalidInput
from mqlayer.outbox import transaction_buffer
from mqlayer.outbox.django_connections import of_alias

_SYNC: Final = ("sessionmaker", "Engine")
_ASYNC: Final = ("async_sessionmaker", "AsyncEngine")
_stand_ins: Final[list[StandInSource]] = []


class StandInSource(Protocol):
    """Lends tests' transactions."""

    def session(self) -> AbstractContextManager[Any]:
        """Return a transaction."""

    def asession(self) -> AbstractAsyncContextManager[Any]:
        """Return one for async code."""


@contextmanager
def stand_in(source: StandInSource) -> Iterator[None]:
    """Take all transactions from a test's source."""
    _stand_ins.append(source)
    try:
        yield
    finally:
        _stand_ins.remove(source)


def is_async_source(source: Any) -> bool:
    """Whether a source's transactions are asynchronous. Raises InvalidInput for what opens none."""
    if isinstance(source, str | ConnectionPool) or _is_sqlalchemys(source, _SYNC):
        return False
    if isinstance(source, AsyncConnectionPool) or _is_sqlalchemys(source, _ASYNC):
        return True
    raise InvalidInput(
        f"a {type(source).__name__} opens no transactions: give SQLAlchemy's sessionmaker, async_sessionmaker or "
        "engine, a psycopg pool, or the alias of a Django database"
    )


@contextmanager
def open_transaction(source: Any) -> Iterator[Any]:
    """Lend a session or connection; commit at the end, roll back on an exception."""
    if _stand_ins:
        with _stand_ins[-1].session() as session:
            yield session
    elif isinstance(source, str):
        with _django_transaction(source) as connection:
            yield connection
    elif isinstance(source, ConnectionPool):
        with source.connection() as connection, transaction_buffer.transaction(connection):
            yield connection
    else:
        with source.begin() as session:
            yield session


@asynccontextmanager
async def aopen_transaction(source: Any) -> AsyncIterator[Any]:
    """As `open_transaction`, of an async source."""
    if _stand_ins:
        async with _stand_ins[-1].asession() as session:
            yield session
    elif isinstance(source, AsyncConnectionPool):
        # Such a pool belongs to the event loop that opens it; a handler's is the member's.
        if source.closed:
            await source.open()
        async with source.connection() as connection, transaction_buffer.atransaction(connection):
            yield connection
    else:
        async with source.begin() as session:
            yield session


@contextmanager
def _django_transaction(alias: str) -> Iterator[Any]:
    connection = of_alias(alias)
    from django.db import transaction

    # As at the end of a request: a connection that broke, or is older than CONN_MAX_AGE, is not used again. One in a
    # block stays: Django would close the transaction of a TestCase, where autocommit is off.
    if not connection.in_atomic_block:
        connection.close_if_unusable_or_obsolete()
    with transaction.atomic(using=alias):
        yield connection


def _is_sqlalchemys(source: Any, names: tuple[str, ...]) -> bool:
    return any(base.__module__.startswith("sqlalchemy.") and base.__name__ in names for base in type(source).__mro__)
