"""Forward-only migrations of the two schemas: control and application, each on its own.

The runner takes an advisory lock, so that two at once run each migration once, sets a lock timeout, and refuses a
database that is newer than this code.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final, Literal

import psycopg
from psycopg import sql

from mqlayer.errors import SchemaMismatch
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Connection, address_of, connect, driver_errors
from mqlayer.resources import sql_names, sql_source

log = logging.getLogger(__name__)

SchemaName = Literal["control", "application"]
SCHEMAS: Final[dict[SchemaName, str]] = {"control": "mqlayer", "application": "mqlayer_app"}

# Taken for the time of a migration; anybody else's use of these two numbers would only make us wait.
ADVISORY_LOCK: Final = (0x6D71, 0x6C79)
GRANTED_FUNCTIONS: Final = (
    "publish_v1(text, text, bytea, jsonb)",
    "publish_many_v1(text[], text[], bytea[], jsonb[])",
    "fence_v1(int, smallint, int, text, bigint, bigint, int)",
    "fence_many_v1(int, smallint[], int[], text[], bigint[], bigint[], int[])",
    "fence_raise_v1(int, smallint, smallint, bigint)",
    "tags_v1(text[])",
    "publish_once_v1(text, text, bytea, text, jsonb)",
    "publish_many_once_v1(text[], text[], bytea[], text[], jsonb[])",
    "publish_at_v1(text, text, bytea, timestamptz, jsonb)",
    "cancel_delayed_v1(bigint)",
    "inbox_put_v1(int, int, smallint, bigint, text, int, bigint)",
    "version_take_v1(text, text, bigint, bytea, text, text, bigint, int, bigint, bigint, bigint, double precision)",
    "version_released_v1(text, double precision)",
    "version_set_v1(text, text, bigint, boolean)",
)


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
    """Return the number of a schema's last migration in this code."""
    return migrations(schema)[-1].number


def migrate(dsn: str, *, schema: SchemaName | None = None) -> list[Migration]:
    """Bring a database up to this code; return what was run. Safe to run twice and at once.

    Without `schema`, both. Raises SchemaMismatch for a newer database, StoreUnavailable when it can't be reached.
    """
    done: list[Migration] = []
    with connect(dsn, application="mqlayer migrate") as connection, driver_errors(address_of(dsn)):
        connection.add_notice_handler(_tell)
        for name in SCHEMAS if schema is None else (schema,):
            done += _migrate_schema(connection, name, address_of(dsn))
    return done


def _tell(notice: psycopg.errors.Diagnostic) -> None:
    """Pass on what a migration has to say to people."""
    if notice.severity_nonlocalized == "WARNING":
        log.warning("migration_says", extra={"text": notice.message_primary})


def script(*, schema: SchemaName | None = None) -> str:
    """Return all migrations as one SQL script for a database administrator."""
    parts = ["-- Run as the owner of the database, in one go.", "BEGIN;"]
    for name in SCHEMAS if schema is None else (schema,):
        for migration in migrations(name):
            parts += [f"-- {name} {migration.number:04d} {migration.name}", migration.text]
            if migration.number == 1:
                parts.append(_table_text(name) + ";")
            parts.append(
                f"INSERT INTO {SCHEMAS[name]}.migration (number, name) VALUES ({migration.number}, '{migration.name}');"
            )
    return "\n".join([*parts, "COMMIT;"]) + "\n"


def grant(dsn: str, role: str) -> None:
    """Let a role publish and use the fence: EXECUTE on those functions and nothing else."""
    name = sql.Identifier(role)
    with connect(dsn) as connection, driver_errors(address_of(dsn)), connection.transaction():
        connection.execute(sql.SQL("GRANT USAGE ON SCHEMA mqlayer_app TO {}").format(name))
        for function in GRANTED_FUNCTIONS:
            text = f"GRANT EXECUTE ON FUNCTION mqlayer_app.{function} TO {{}}"
            connection.execute(sql.SQL(text).format(name))


def check_schema(connection: Connection, schema: SchemaName, address: str) -> None:
    """Raise SchemaMismatch unless the schema is there and as new as this code."""
    found, wanted = _number(connection, schema), latest(schema)
    if found == wanted:
        return
    if found > wanted:
        raise SchemaMismatch(address, f"{schema} {found}", f"{schema} {wanted}", "upgrade mqlayer on this machine")
    shown = f"{schema} {found}" if found else f"without the {schema} schema"
    raise SchemaMismatch(address, shown, f"{schema} {wanted}", "run `mqlayer migrate`")


def _migrate_schema(connection: Connection, schema: SchemaName, address: str) -> list[Migration]:
    connection.execute("SELECT pg_advisory_lock(%s, %s)", ADVISORY_LOCK)
    try:
        at, wanted = _number(connection, schema), latest(schema)
        if at > wanted:
            raise SchemaMismatch(
                address,
                f"{schema} {at}",
                f"{schema} {wanted}",
                "upgrade mqlayer; the database was not touched",
            )
        pending = [migration for migration in migrations(schema) if migration.number > at]
        for migration in pending:
            _run(connection, migration)
        return pending
    finally:
        if not connection.closed:
            connection.execute("SELECT pg_advisory_unlock(%s, %s)", ADVISORY_LOCK)


def _run(connection: Connection, migration: Migration) -> None:
    with connection.transaction():
        connection.execute("SET LOCAL lock_timeout = '5s'")
        connection.execute(migration.text)
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
    """Return the last migration that the database has, 0 for none."""
    table = f"{SCHEMAS[schema]}.migration"
    row = connection.execute("SELECT to_regclass(%s)", (table,)).fetchone()
    if row is None or row[0] is None:
        return 0
    row = connection.execute(f"SELECT coalesce(max(number), 0) FROM {table}").fetchone()
    return int(row[0]) if row else 0
