"""Forward-only migrations of both schemas, serialized by an advisory lock.

A role without login owns the schemas and runs migrations (`sql/owner/prepare.sql`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

import psycopg
from psycopg import sql

from mqlayer.errors import ConfigurationRefused, SchemaMismatch
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres import rights
from mqlayer.postgres.database import Connection, address_of, connect_directly, driver_errors
from mqlayer.resources import sql_names, sql_source

log = event_logger(__name__)

SchemaName = Literal["control", "application"]
SCHEMAS: Final[dict[SchemaName, str]] = {"control": "mqlayer", "application": "mqlayer_app"}

DEFAULT_OWNER: Final = "mqlayer_owner"
# Without it, pg_temp is searched first for types and tables.
SEARCH_PATH: Final = "SET LOCAL search_path = pg_catalog, pg_temp"
_OWNER_BESIDE_READER: Final = """
SELECT pg_get_userbyid(n.nspowner) FROM pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid
WHERE n.nspname = %s AND c.relname = 'migration' AND NOT pg_has_role(n.nspowner, 'MEMBER')
  AND has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')
"""
_MAKER_OF_TESTS: Final = """
SELECT current_user FROM pg_database d JOIN pg_roles me ON me.rolname = current_user
WHERE d.datname = current_database() AND d.datdba = me.oid AND NOT me.rolsuper
  AND NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = ANY(%s))
  AND CASE WHEN EXISTS (SELECT FROM pg_roles WHERE rolname = %s)
           THEN NOT EXISTS (SELECT FROM pg_roles o WHERE o.rolname = %s AND pg_has_role(o.oid, 'MEMBER'))
           ELSE NOT me.rolcreaterole END
"""

# Held during a migration; a foreign use of these numbers only makes us wait.
ADVISORY_LOCK: Final = (0x6D71, 0x6C79)


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of one schema."""

    schema: SchemaName
    number: int
    name: str
    text: str


def migrations(schema: SchemaName) -> list[Migration]:
    """Return a schema's migrations in order."""
    found = []
    for file in sql_names(f"migrations/{schema}"):
        number, name = file.removesuffix(".sql").split("_", 1)
        found.append(Migration(schema, int(number), name, sql_source(f"migrations/{schema}/{file}")))
    return found


def latest(schema: SchemaName) -> int:
    """Return a schema's last migration number in this code."""
    return migrations(schema)[-1].number


def migrate(dsn: str, *, schema: SchemaName | None = None, owner: str | None = None) -> list[Migration]:
    """Migrate one schema or both; return the migrations run. Safe to repeat and to run concurrently.

    `owner`: by default the present one, else `mqlayer_owner`. A current schema asks nothing of its readers.
    Raises SchemaMismatch for a newer database, ConfigurationRefused without UTF-8 or for an owner that is a superuser
    or can't be created, StoreUnavailable.
    """
    done: list[Migration] = []
    with _connection(dsn) as connection, driver_errors(address_of(dsn)):
        connection.add_notice_handler(_pass_on)
        for name in SCHEMAS if schema is None else (schema,):
            done += _migrate_schema(connection, name, address_of(dsn), owner)
    return done


def migrate_for_tests(dsn: str, *, schema: SchemaName | None = None) -> None:
    """Migrate a database of tests; its maker may own the schemas."""
    with _connection(dsn) as connection, driver_errors(address_of(dsn)):
        names = ([*SCHEMAS.values()] if schema is None else [SCHEMAS[schema]], DEFAULT_OWNER, DEFAULT_OWNER)
        row = connection.execute(_MAKER_OF_TESTS, names).fetchone()
    migrate(dsn, schema=schema, owner=row[0] if row else None)


def _pass_on(notice: psycopg.errors.Diagnostic) -> None:
    if notice.severity_nonlocalized == "WARNING":
        log.warning("migration_notice", extra={"text": notice.message_primary})


def script(*, schema: SchemaName | None = None, owner: str | None = None) -> str:
    """Return all migrations as one SQL script."""
    parts = [
        "-- Run in one go, as a superuser, or as the owner of the database with CREATEROLE.",
        "BEGIN;",
        "SET LOCAL client_encoding = 'UTF8';",
    ]
    for name in SCHEMAS if schema is None else (schema,):
        parts += [f"{SEARCH_PATH};", _owner_script(name, owner)]
        parts.append("SELECT set_config('role', current_setting('mqlayer.owner'), true);")
        for migration in migrations(name):
            parts += [f"-- {name} {migration.number:04d} {migration.name}", migration.text]
            if migration.number == 1:
                parts.append(_table_text(name) + ";")
            parts.append(
                f"INSERT INTO {SCHEMAS[name]}.migration (number, name) VALUES ({migration.number}, '{migration.name}');"
            )
        parts += [sql_source("owner/paths.sql"), "RESET ROLE;"]
    return "\n".join([*parts, "COMMIT;"]) + "\n"


def check_schema(connection: Connection, schema: SchemaName, address: str) -> None:
    """Raise SchemaMismatch unless the schema matches this code."""
    found, wanted = _number(connection, schema), latest(schema)
    if found == wanted:
        return
    if found > wanted:
        raise SchemaMismatch(
            address, f"{schema} schema {found}", f"{schema} schema {wanted}", "upgrade mqlayer on this machine"
        )
    shown = f"{schema} schema {found}" if found else f"no {schema} schema"
    raise SchemaMismatch(address, shown, f"{schema} schema {wanted}", "run `mqlayer migrate`")


def _connection(dsn: str) -> Connection:
    return connect_directly(dsn, purpose="the lock of a migration", application="mqlayer migrate")


def _migrate_schema(connection: Connection, schema: SchemaName, address: str, owner: str | None) -> list[Migration]:
    connection.execute("SELECT pg_advisory_lock(%s, %s)", ADVISORY_LOCK)
    try:
        if _is_current_to_reader(connection, schema, owner):
            return []
        at = _prepare_owner(connection, schema, address, owner)
        pending = [migration for migration in migrations(schema) if migration.number > at]
        for migration in pending:
            _run(connection, migration)
        with connection.transaction():
            connection.execute(SEARCH_PATH)
            rights.regrant_all(connection, schema)
        return pending
    finally:
        if not connection.closed:
            connection.execute("RESET ROLE")
            connection.execute("SELECT pg_advisory_unlock(%s, %s)", ADVISORY_LOCK)


def _is_current_to_reader(connection: Connection, schema: SchemaName, owner: str | None) -> bool:
    """Return whether a reader has nothing to do."""
    with connection.transaction():
        connection.execute(SEARCH_PATH)
        row = connection.execute(_OWNER_BESIDE_READER, (SCHEMAS[schema],)).fetchone()
        return row is not None and owner in (None, row[0]) and _number(connection, schema) == latest(schema)


def _prepare_owner(connection: Connection, schema: SchemaName, address: str, owner: str | None) -> int:
    # Otherwise the session uses the database's encoding.
    connection.execute("SET client_encoding = 'UTF8'")
    with _refusals(address), connection.transaction():
        connection.execute("SET LOCAL lock_timeout = '5s'")
        connection.execute(SEARCH_PATH)
        connection.execute(_owner_script(schema, owner))
        connection.execute("SELECT set_config('role', current_setting('mqlayer.owner'), false)")
        at, wanted = _number(connection, schema), latest(schema)
        if at > wanted:
            hint = "upgrade mqlayer; the database was not touched"
            raise SchemaMismatch(address, f"{schema} schema {at}", f"{schema} schema {wanted}", hint)
        connection.execute(sql_source("owner/paths.sql"))
    return at


def _owner_script(schema: SchemaName, owner: str | None) -> str:
    settings = {"mqlayer.schema": SCHEMAS[schema], "mqlayer.owner": owner or ""}
    parts = [f"SELECT set_config('{name}', {sql.quote(value)}, false);" for name, value in settings.items()]
    return "\n".join([*parts, sql_source("owner/prepare.sql")])


@contextmanager
def _refusals(address: str) -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate not in ("MQ010", "MQ011"):
            raise
        raise ConfigurationRefused(
            address, "", error.diag.message_primary or "", error.diag.message_hint or ""
        ) from error


def _run(connection: Connection, migration: Migration) -> None:
    with connection.transaction():
        connection.execute("SET LOCAL lock_timeout = '5s'")
        connection.execute(SEARCH_PATH)
        connection.execute(migration.text)
        connection.execute(sql_source("owner/paths.sql"))
        if migration.number == 1:
            connection.execute(_table_text(migration.schema))
        failpoint("migrate.before_record")
        connection.execute(
            f"INSERT INTO {SCHEMAS[migration.schema]}.migration (number, name) VALUES (%s, %s)",
            (migration.number, migration.name),
        )


def _table_text(schema: SchemaName) -> str:
    return (
        f"CREATE TABLE {SCHEMAS[schema]}.migration (number int PRIMARY KEY, name text NOT NULL, "
        "at timestamptz NOT NULL DEFAULT now())"
    )


def _number(connection: Connection, schema: SchemaName) -> int:
    table = f"{SCHEMAS[schema]}.migration"
    row = connection.execute("SELECT to_regclass(%s)", (table,)).fetchone()
    if row is None or row[0] is None:
        return 0
    row = connection.execute(f"SELECT coalesce(max(number), 0) FROM {table}").fetchone()
    return int(row[0]) if row else 0
