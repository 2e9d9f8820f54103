"""Reading much at once, as Arrow, on connections that can only read.

The driver for it (ADBC) and Arrow come with the extras `parquet` and `spark`; nothing else needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from psycopg.conninfo import make_conninfo

from mqlayer.errors import (
    ArchiveBroken,
    InvalidInput,
    MqlayerError,
    NotFound,
    SchemaMismatch,
    StoreUnavailable,
    TransactionConflict,
)
from mqlayer.postgres.database import address_of, connect_directly
from mqlayer.postgres.queries import query
from mqlayer.postgres.session_setup import is_direct, reading_options, refuse_pooled
from mqlayer.settings import ConnectionOptions, Dsn, options_of

if TYPE_CHECKING:
    import pyarrow as pa

READ_ONLY: Final = reading_options()
"""One view of the data for all statements of a transaction, and nothing is ever written."""
PURPOSE: Final = "reading by Arrow or JDBC"
BATCH_BYTES: Final = 8_000_000
"""About how much one Arrow batch holds."""
# The address that the host's name had, and what only newer client libraries know: these are for another process.
_OMITTED: Final = ("hostaddr", "sslcertmode", "application_name")
_CONFLICTS: Final = ("40001", "40P01", "55P03")
_MISSING: Final = ("42P01", "3F000", "42883")


@dataclass(frozen=True, slots=True)
class ReadAddress:
    """A database as it was reached once: every parameter in force, wherever it came from (DSN, service, environment,
    password file), so that another process reaches the same without them. Never shows its password."""

    parameters: Mapping[str, str] = field(repr=False)
    password: str = field(repr=False)

    @property
    def display(self) -> str:
        """Host, port and database, for messages."""
        return address_of(make_conninfo("", **self.parameters))

    def conninfo(self, *, application: str) -> Dsn:
        """Return the DSN of a connection that can only read, to be given to the driver only."""
        options = f"{self.parameters.get('options', '')} {READ_ONLY}".strip()
        facts = {**self.parameters, "options": options, "application_name": application}
        dsn = make_conninfo("", **facts, **({"password": self.password} if self.password else {}))
        return Dsn(dsn, ConnectionOptions(reads_only=True))


def read_address(dsn: str) -> ReadAddress:
    """Connect once and return what was in force. Raises StoreUnavailable, ConfigurationRefused behind a pooler."""
    if not dsn:
        raise InvalidInput("no database given: set MQLAYER_DSN, or give a dsn")
    with connect_directly(dsn, purpose=PURPOSE, application="mqlayer read") as connection:
        if not is_direct(connection):
            # Poolers take no options at connecting, or drop them.
            raise refuse_pooled(options_of(dsn), address_of(dsn), PURPOSE)
        info = connection.info
        known = {name: value for name, value in info.get_parameters().items() if name not in _OMITTED}
        named = {"host": info.host, "port": str(info.port), "user": info.user, "dbname": info.dbname}
        return ReadAddress(known | named, info.password)


def bound(name: str, facts: Mapping[str, int]) -> str:
    """Return a named query with whole numbers in the place of its parameters, for drivers that bind none."""
    lines = (line for line in query(name).splitlines() if not line.startswith("--"))
    return "\n".join(lines) % {key: int(value) for key, value in facts.items()}


@contextmanager
def arrow_batches(
    address: ReadAddress, statements: Sequence[str], *, application: str
) -> Iterator[Iterator[pa.RecordBatch]]:
    """Run statements in one read-only transaction and yield the batches of the last one as they come.

    Memory: a few batches of some megabytes, whatever the answer's size. Raises StoreUnavailable, NotFound of what a
    statement refused.
    """
    try:
        import adbc_driver_manager as manager
        import adbc_driver_postgresql as adbc
        from adbc_driver_postgresql import dbapi
    except ImportError:
        raise InvalidInput("reading as Arrow needs more packages: pip install 'mqlayer[parquet]'") from None
    try:
        with dbapi.connect(address.conninfo(application=application)) as connection, connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{adbc.StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(BATCH_BYTES)})
            for statement in statements[:-1]:
                cursor.execute(statement)
                cursor.fetchall()
            cursor.execute(statements[-1])
            yield iter(cursor.fetch_record_batch())
    except manager.Error as error:
        raise _translated(error, address) from None


def _translated(error: Exception, address: ReadAddress) -> MqlayerError:
    state = getattr(error, "sqlstate", None) or ""
    # What the driver says in front of the server's own words has the statement in it, and so what was asked for.
    text = str(error).splitlines()[0].rpartition("ERROR:")[2].strip()
    if state == "MQ007":
        return NotFound("snapshot", "(dropped)", "it was dropped while it was read: create another one")
    if state == "MQ008":
        return ArchiveBroken(text, "a stream goes on where it was; begin a new one, with a new checkpoint")
    if state in _CONFLICTS:
        return TransactionConflict(state, text)
    if state in _MISSING:
        return SchemaMismatch(address.display, "missing or older", "migrated", f"run `mqlayer migrate` ({text})")
    return StoreUnavailable(address.display, text)
