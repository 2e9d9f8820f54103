"""Read large results as Arrow (extra `parquet` or `spark`)."""

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
PURPOSE: Final = "reading by Arrow or JDBC"
BATCH_BYTES: Final = 8_000_000
# Of this process only: the resolved address, and parameters that older client libraries lack.
_OMITTED: Final = ("hostaddr", "sslcertmode", "application_name")
_CONFLICTS: Final = ("40001", "40P01", "55P03")
_MISSING: Final = ("42P01", "3F000", "42883")


@dataclass(frozen=True, slots=True)
class ReadAddress:
    """A database's parameters, for other processes. Its repr hides the password."""

    parameters: Mapping[str, str] = field(repr=False)
    password: str = field(repr=False)

    @property
    def display(self) -> str:
        """Host, port and database."""
        return address_of(make_conninfo("", **self.parameters))

    def conninfo(self, *, application: str) -> Dsn:
        """Return a read-only connection's DSN, with password."""
        options = f"{self.parameters.get('options', '')} {READ_ONLY}".strip()
        facts = {**self.parameters, "options": options, "application_name": application}
        dsn = make_conninfo("", **facts, **({"password": self.password} if self.password else {}))
        return Dsn(dsn, ConnectionOptions(reads_only=True))


def read_address(dsn: str) -> ReadAddress:
    """Connect and return the parameters. Raises StoreUnavailable; ConfigurationRefused behind a pooler."""
    if not dsn:
        raise InvalidInput("no database given: set MQLAYER_DSN, or give a dsn")
    with connect_directly(dsn, purpose=PURPOSE, application="mqlayer read") as connection:
        if not is_direct(connection):
            # Poolers refuse or drop connection options.
            raise refuse_pooled(options_of(dsn), address_of(dsn), PURPOSE)
        info = connection.info
        known = {name: value for name, value in info.get_parameters().items() if name not in _OMITTED}
        named = {"host": info.host, "port": str(info.port), "user": info.user, "dbname": info.dbname}
        return ReadAddress(known | named, info.password)


def bound(name: str, facts: Mapping[str, int]) -> str:
    """Return a named query with whole numbers bound."""
    lines = (line for line in query(name).splitlines() if not line.startswith("--"))
    return "\n".join(lines) % {key: int(value) for key, value in facts.items()}


@contextmanager
def arrow_batches(
    address: ReadAddress, statements: Sequence[str], *, application: str
) -> Iterator[Iterator[pa.RecordBatch]]:
    """Run statements in one read-only transaction; yield the last one's batches of about 8 MB.

    Raises StoreUnavailable, NotFound for a dropped snapshot, ArchiveBroken, TransactionConflict, SchemaMismatch,
    InvalidInput without the packages.
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
    # The driver's prefix contains the statement.
    text = str(error).splitlines()[0].rpartition("ERROR:")[2].strip()
    if state == "MQ007":
        return NotFound("snapshot", "(dropped)", "it was dropped while it was read: create another one")
    if state == "MQ013":
        return ArchiveBroken(text, "read the snapshot with its export: mqlayer archive exports shows where it is")
    if state == "MQ008":
        return ArchiveBroken(text, "a stream goes on where it was; begin a new one, with a new checkpoint")
    if state in _CONFLICTS:
        return TransactionConflict(state, text)
    if state in _MISSING:
        return SchemaMismatch(
            address.display,
            "no schema of mqlayer, or an older one",
            "the current one",
            f"run `mqlayer migrate` ({text})",
        )
    return StoreUnavailable(address.display, text)
