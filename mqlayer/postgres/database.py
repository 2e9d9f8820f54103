"""Connections to Postgres: pools, retries, error translation."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import psycopg
from psycopg import errors as pg_errors
from psycopg_pool import ConnectionPool, PoolTimeout
from tenacity import Retrying, retry_if_exception_type, stop_after_delay

from mqlayer.domain.protocol import ProtocolRange
from mqlayer.errors import (
    BodyTooLarge,
    ConfigurationRefused,
    Conflict,
    InvalidInput,
    KeyTooLarge,
    MqlayerError,
    NotFound,
    OutOfRange,
    PermissionDenied,
    ReservedHeader,
    SchemaMismatch,
    StoreUnavailable,
    TransactionConflict,
    VersionRefused,
    redact,
)
from mqlayer.postgres.dsn import address_of, parse_dsn
from mqlayer.postgres.server_identity import meet_server
from mqlayer.postgres.session_setup import is_direct, is_own, refuse_moved, refuse_pooled, set_up
from mqlayer.postgres.tls_hints import tls_hint
from mqlayer.randomness import RNG, FullJitter
from mqlayer.settings import NO_DATABASE, Dsn, options_of

Result = TypeVar("Result")
Connection = psycopg.Connection[tuple[Any, ...]]

_KEEPALIVE: Final = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
FIRST_TRY_S: Final = 0.1
LONGEST_TRY_S: Final = 0.5
"""First and longest wait for a pooled connection; short, to find a recovered server soon."""
_NUMBER: Final = re.compile(r"\b\d+\b")
_GRANT: Final = "see who has which right with `mqlayer grants`, and give one with `mqlayer grant RIGHT ROLE`"
_POOL: Final = "mqlayer database"
_RETRYABLE: Final = (pg_errors.SerializationFailure, pg_errors.DeadlockDetected, pg_errors.LockNotAvailable)


def _is_of_other_pool(record: logging.LogRecord) -> bool:
    return not (isinstance(record.args, tuple) and _POOL in record.args)


# Our own events say it, once for an outage.
logging.getLogger("psycopg.pool").addFilter(_is_of_other_pool)


def connect(dsn: str, *, autocommit: bool = True, application: str = "mqlayer") -> Connection:
    """Return a set-up connection. Raises StoreUnavailable, ConfigurationRefused."""
    address = address_of(dsn)
    with driver_errors(address):
        connection = psycopg.connect(dsn, autocommit=True, **_arguments(dsn, application))
        try:
            set_up(connection, options_of(dsn), application=application, address=address)
            connection.autocommit = autocommit
        except BaseException:
            connection.close()
            raise
        return connection


def connect_directly(dsn: str, *, purpose: str, application: str = "mqlayer") -> Connection:
    """Return a connection with its own session, past any pooler.

    Raises StoreUnavailable; ConfigurationRefused without a direct way.
    """
    connection = connect_at_best(dsn, application=application)
    if not is_own(connection):
        connection.close()
        raise refuse_pooled(options_of(dsn), address_of(dsn), purpose)
    return connection


def connect_at_best(dsn: str, *, application: str) -> Connection:
    """Return a direct connection if possible, else by the DSN. Raises as `connect`."""
    options = options_of(dsn)
    return connect(Dsn(options.direct, options) if options.direct else dsn, application=application)


class _SessionEnded(StoreUnavailable):
    """A transaction's session ended before its commit."""


class _Pool(ConnectionPool[Connection]):
    """A pool whose connections' lifetimes leave Python's global random generator alone."""

    @classmethod
    def _jitter(cls, value: float, min_pc: float, max_pc: float) -> float:
        return value * (1 + RNG.uniform(min_pc, max_pc))


class Database:
    """A pool of connections to one Postgres, opened at first use; open it after forking.

    Methods raise StoreUnavailable if the server is unreachable.
    """

    def __init__(self, dsn: str, *, application: str = "mqlayer", max_size: int = 4, timeout_s: float = 5.0) -> None:
        if not dsn:
            raise InvalidInput(NO_DATABASE)
        self.dsn, self.address, self._application = dsn, address_of(dsn), application
        self._refused: ConfigurationRefused | None = None
        self._pooled: bool | None = None
        self._in_use: set[int] = set()
        self._pool = _Pool(
            dsn,
            name=_POOL,
            kwargs={"autocommit": True, **_arguments(dsn, application)},
            min_size=0,
            max_size=max_size,
            max_idle=60,
            max_lifetime=1200,
            # The pool's own backoff (1, 2, 4 s …) delays the return to a recovered server: see `_acquire`.
            reconnect_timeout=0,
            configure=self._set_up,
            open=False,
        )
        self._timeout_s = timeout_s

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Lend a connection in autocommit mode."""
        with driver_errors(self.address):
            self._pool.open()
            with self._borrowed() as connection:
                yield connection

    def first_row(self, statement: Any, facts: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Return a statement's first row; it may run twice."""
        rows = self.rows(statement, facts)
        return rows[0] if rows else None

    def rows(self, statement: Any, facts: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Return a statement's rows; it may run twice."""
        with driver_errors(self.address):
            self._pool.open()
            with self._borrowed(checked=False) as connection:
                # The statement itself shows whether the connection lives: one round trip less.
                try:
                    return connection.execute(statement, facts).fetchall()
                except psycopg.OperationalError:
                    if not connection.broken:
                        raise
        with self.connection() as connection:
            return connection.execute(statement, facts).fetchall()

    def check_direct(self, purpose: str) -> None:
        """Check that direct connections work. Raises ConfigurationRefused, StoreUnavailable."""
        if self._pooled is None:
            with self.connection():
                pass
        if self._pooled:
            connect_directly(self.dsn, purpose=purpose, application=self._application).close()

    def _set_up(self, connection: Connection) -> None:
        try:
            options = options_of(self.dsn)
            self._pooled = not set_up(connection, options, application=self._application, address=self.address).own
            self._refused = None
        except ConfigurationRefused as error:
            # The pool hides the error and tries again.
            self._refused = error
            raise
        meet_server(connection)

    @contextmanager
    def _borrowed(self, *, checked: bool = True) -> Iterator[Connection]:
        try:
            connection = self._acquire(checked=checked)
        except PoolTimeout:
            connection = None
        if connection is None:
            with self._connected_beside() as beside:
                yield beside
            return
        self._in_use.add(id(connection))
        try:
            with connection:
                yield connection
        finally:
            self._in_use.discard(id(connection))
            self._pool.putconn(connection)

    @contextmanager
    def _connected_beside(self) -> Iterator[Connection]:
        """Lend a connection outside of the pool, unless all of its own are in use.

        Connecting shows why the pool timed out, or that it was only slow.
        """
        with connect(self.dsn, application=self._application) as connection:
            meet_server(connection)
            in_use = len(self._in_use)
            if in_use >= self._pool.max_size:
                raise StoreUnavailable(self.address, f"all {in_use} connections of this process are in use")
            yield connection

    def _acquire(self, *, checked: bool) -> Connection:
        deadline, wait_s = time.monotonic() + self._timeout_s, FIRST_TRY_S
        while True:
            left_s = deadline - time.monotonic()
            try:
                connection = self._pool.getconn(timeout=min(wait_s, left_s))
            except PoolTimeout:
                # Each try makes the pool connect once; the pool does not report failures to waiters.
                if self._refused is not None:
                    raise self._refused from None
                if left_s <= wait_s:
                    raise
                wait_s = min(2 * wait_s, LONGEST_TRY_S)
                continue
            if (not checked and is_direct(connection)) or self._answers(connection):
                return connection

    def _answers(self, connection: Connection) -> bool:
        try:
            if not refuse_moved(connection, self.address):
                ConnectionPool.check_connection(connection)
        except psycopg.Error:
            self._pool.putconn(connection)
            return False
        except BaseException:
            self._pool.putconn(connection)
            raise
        return True

    def transaction(self, work: Callable[[Connection], Result], *, timeout_s: float = 10.0) -> Result:
        """Run `work` in a transaction, again after conflicts until the timeout, then raise the last error. It must have
        no other effect."""
        retrying = Retrying(
            retry=retry_if_exception_type((TransactionConflict, _SessionEnded)),
            wait=FullJitter(multiplier=0.02, max=0.5),
            stop=stop_after_delay(timeout_s),
            reraise=True,
        )
        result: Result = retrying(self._run, work)
        return result

    def _run(self, work: Callable[[Connection], Result]) -> Result:
        with self.connection() as connection, driver_errors(self.address), connection.transaction():
            try:
                return work(connection)
            except psycopg.Error as error:
                # Nothing is committed: the session of a process that was stopped meets its idle limit.
                if connection.broken:
                    raise _SessionEnded(self.address, str(error) or type(error).__name__) from error
                raise

    def close(self) -> None:
        """Close the pool."""
        self._pool.close(timeout=2)

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def driver_errors(address: str) -> Iterator[None]:
    """Turn driver errors into mqlayer's; others pass."""
    try:
        yield
    except (psycopg.Error, PoolTimeout) as error:
        raise translate(error, address) from error


_OF_OTHER_SCHEMA: Final = (
    pg_errors.UndefinedTable,
    pg_errors.InvalidSchemaName,
    pg_errors.UndefinedFunction,
    pg_errors.UndefinedColumn,
)


def translate(error: Exception, address: str = "postgres") -> MqlayerError:
    """Return mqlayer's error for a driver error."""
    state = getattr(error, "sqlstate", None) or ""
    text = redact(str(error).splitlines()[0]) if str(error) else type(error).__name__
    if isinstance(error, _RETRYABLE):
        return TransactionConflict(state, text)
    if state.startswith("MQ"):
        return _published_error(error, state, text, address)
    if isinstance(error, pg_errors.UntranslatableCharacter | pg_errors.CharacterNotInRepertoire):
        return InvalidInput(f"{text}: set the session's client_encoding to UTF8")
    if isinstance(error, pg_errors.ReadOnlySqlTransaction):
        text += ": default_transaction_read_only is on, or it is a standby"
    if isinstance(error, pg_errors.InFailedSqlTransaction):
        return InvalidInput(f"{text}: an earlier statement of this transaction failed, so it can only be rolled back")
    if isinstance(error, psycopg.IntegrityError):
        return Conflict(text)
    if isinstance(error, psycopg.DataError):
        return InvalidInput(text)
    if isinstance(error, pg_errors.InsufficientPrivilege):
        return PermissionDenied(address, text, _hint(error) or _GRANT)
    if isinstance(error, _OF_OTHER_SCHEMA):
        return SchemaMismatch(
            address, "no schema of mqlayer, or an older one", "the current one", f"run `mqlayer migrate` ({text})"
        )
    return StoreUnavailable(address, text + tls_hint(str(error)))


def _version_refused(error: Exception, address: str, text: str) -> VersionRefused:
    least, most, serves_from, serves_to = map(int, _NUMBER.findall(text)[:4])
    schema = "application" if "application schema" in text else "control"
    served, known = ProtocolRange(serves_from, serves_to), ProtocolRange(least, most)
    return VersionRefused(address, f"{schema} protocol {served}", f"protocol {known}", _hint(error))


def _published_error(error: Exception, state: str, text: str, address: str) -> MqlayerError:
    if state == "MQ012":
        return _version_refused(error, address, text)
    hint = _hint(error)
    if state == "MQ001":
        return NotFound("topic", text.split('"')[1] if '"' in text else text, hint)
    numbers = [int(number) for number in _NUMBER.findall(text)]
    if state == "MQ002" and len(numbers) == 2:
        return KeyTooLarge(*numbers)
    if state == "MQ003" and len(numbers) >= 2:
        return BodyTooLarge(text.split('"')[1], numbers[0], numbers[-1])
    if state == "MQ004":
        return ReservedHeader(text)
    if state == "MQ009":
        return OutOfRange(text, hint)
    return InvalidInput(f"{text}: {hint}" if hint else text)


def _hint(error: Exception) -> str:
    return getattr(error, "hint", None) or getattr(getattr(error, "diag", None), "message_hint", None) or ""


def _arguments(dsn: str, application: str) -> dict[str, Any]:
    given = parse_dsn(dsn)
    fixed = {"application_name": application, "client_encoding": "UTF8"}
    return fixed | {k: v for k, v in _KEEPALIVE.items() if k not in given}


__all__ = [
    "Connection",
    "Database",
    "address_of",
    "connect",
    "connect_at_best",
    "connect_directly",
    "driver_errors",
    "translate",
]
