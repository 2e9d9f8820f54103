"""The runtime of a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from mqlayer.cli.actor import actor
from mqlayer.cli.addresses import settings_here
from mqlayer.errors import PermissionDenied
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import SchemaName, check_schema
from mqlayer.runtime.runtime import Runtime, open_runtime


@contextmanager
def runtime_here() -> Iterator[Runtime]:
    """Lend the databases and settings of this process, and its user as the actor.

    Raises SchemaMismatch and VersionRefused where the control schema does not serve this code, StoreUnavailable.
    """
    with runtime_of_any_version() as runtime:
        _check(runtime.control, "control")
        yield runtime


@contextmanager
def control_here() -> Iterator[Database]:
    """Lend the control database alone. Raises as `runtime_here`."""
    with Database(settings_here().control_dsn()) as database:
        _check(database, "control")
        yield database


@contextmanager
def application_here() -> Iterator[Database]:
    """Lend the application's database alone. Raises as `runtime_here`, of the application schema."""
    with Database(settings_here().application_dsn()) as database:
        _check(database, "application")
        yield database


def runtime_of_any_version() -> AbstractContextManager[Runtime]:
    """As `runtime_here`, also for code that is refused: it looks at an upgrade, and cancels it."""
    return open_runtime(settings_here(), actor=actor())


def _check(database: Database, schema: SchemaName) -> None:
    # What a role without rights lacks, the command itself says best.
    with suppress(PermissionDenied), database.connection() as connection:
        check_schema(connection, schema, database.address)
