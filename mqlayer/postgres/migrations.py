"""Forward-only migrations of both schemas, serialized by an advisory lock.

A role without login owns the schemas and runs migrations (`sql/owner/prepare.sql`). *Expand* steps suit the code before
them; *contract* steps wait until a finalization put their protocol version in force (docs/design/upgrades.md). A new
schema takes both at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

import psycopg
from psycopg import sql

from mqlayer.domain.protocol import PROTOCOL, ServedProtocols
from mqlayer.errors import ConfigurationRefused, SchemaMismatch
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres import rights
from mqlayer.postgres.database import Connection, address_of, connect_directly, driver_errors
from mqlayer.postgres.protocol import read_protocols, refuse_unserved
from mqlayer.postgres.queries import query
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

_PROTOCOL: Final = re.compile(r"-- protocol (\d+)\n")
_ACTING_BEFORE: Final = {"control": "acting_before_control", "application": "acting_before_application"}
_FINISH: Final = """
UPDATE {schema}.protocol SET serves_to = {most}, expanded_at = now(),
    in_force = CASE in_force WHEN 0 THEN {most} ELSE in_force END,
    serves_from = CASE in_force WHEN 0 THEN {most} ELSE serves_from END
WHERE serves_to < {most}
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

    @property
    def contracts(self) -> bool:
        """Whether it waits for its protocol version."""
        return self.name.startswith("contract_")

    @property
    def protocol(self) -> int:
        """The version that it belongs to, by its first line."""
        found = _PROTOCOL.match(self.text)
        return int(found[1]) if found else 1


def migrations(schema: SchemaName) -> list[Migration]:
    """Return a schema's migrations in order."""
    found = []
    for file in sql_names(f"migrations/{schema}"):
        number, name = file.removesuffix(".sql").split("_", 1)
        found.append(Migration(schema, int(number), name, sql_source(f"migrations/{schema}/{file}")))
    return found


def latest(schema: SchemaName) -> int:
    """Return the number of a schema's last expand step in this code."""
    return max(step.number for step in migrations(schema) if not step.contracts)


def migrate(dsn: str, *, schema: SchemaName | None = None, owner: str | None = None) -> list[Migration]:
    """Run the expand steps of one schema or both; return them. Safe to repeat and to run concurrently.

    Older code changes nothing in a newer schema that serves it.
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
    """Return all migrations of a new database as one SQL script."""
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
        parts.append(_FINISH.format(schema=SCHEMAS[name], most=PROTOCOL.most).strip() + ";")
        parts += [sql_source("owner/paths.sql"), "RESET ROLE;"]
    return "\n".join([*parts, "COMMIT;"]) + "\n"


def contract(dsn: str, *, schema: SchemaName) -> list[Migration]:
    """Run the contract steps of versions in force; return them.

    A step waits while a process acts on an earlier version. Raises SchemaMismatch, StoreUnavailable, or
    TransactionConflict for a lock that others hold.
    """
    with _connection(dsn) as connection, driver_errors(address_of(dsn)):
        connection.add_notice_handler(_pass_on)
        with _locked(connection):
            _prepare_owner(connection, schema, address_of(dsn), None)
            done = []
            for step in pending_contracts(connection, schema):
                if not _run(connection, step):
                    break
                done.append(step)
            if done:
                _regrant(connection, schema)
            return done


def pending_contracts(connection: Connection, schema: SchemaName) -> list[Migration]:
    """Return the contract steps that did not run, of versions in force."""
    applied = _applied(connection, schema)
    in_force = read_protocols(connection, schema).served.in_force
    steps = (step for step in migrations(schema) if step.contracts and step.number not in applied)
    return [step for step in steps if step.protocol <= in_force]


def check_schema(connection: Connection, schema: SchemaName, address: str) -> ServedProtocols:
    """Return the versions that a schema serves. Raises SchemaMismatch unless it suits this code, VersionRefused."""
    applied, wanted = _applied(connection, schema), latest(schema)
    if not _missing(schema, applied):
        served = read_protocols(connection, schema).served
        refuse_unserved(served, schema, address)
        return served
    found = max(applied, default=0)
    shown = f"{schema} schema {found}" if found else f"no {schema} schema"
    raise SchemaMismatch(address, shown, f"{schema} schema {wanted}", "run `mqlayer migrate`")


def _connection(dsn: str) -> Connection:
    return connect_directly(dsn, purpose="the lock of a migration", application="mqlayer migrate")


@contextmanager
def _locked(connection: Connection) -> Iterator[None]:
    connection.execute("SELECT pg_advisory_lock(%s, %s)", ADVISORY_LOCK)
    try:
        yield
    finally:
        if not connection.closed:
            connection.execute("RESET ROLE")
            connection.execute("SELECT pg_advisory_unlock(%s, %s)", ADVISORY_LOCK)


def _migrate_schema(connection: Connection, schema: SchemaName, address: str, owner: str | None) -> list[Migration]:
    with _locked(connection):
        if _is_current_to_reader(connection, schema, owner):
            return []
        applied = _prepare_owner(connection, schema, address, owner)
        if _is_newer(schema, applied):
            return []
        # A schema that is being made has no older code.
        anew = not applied or _is_being_made(connection, schema)
        pending = [step for step in migrations(schema) if step.number not in applied and (anew or not step.contracts)]
        for migration in pending:
            _run(connection, migration)
        failpoint("migrate.before_serving")
        connection.execute(_FINISH.format(schema=SCHEMAS[schema], most=PROTOCOL.most))
        _regrant(connection, schema)
        return pending


def _regrant(connection: Connection, schema: SchemaName) -> None:
    with connection.transaction():
        connection.execute(SEARCH_PATH)
        rights.regrant_all(connection, schema)


def _missing(schema: SchemaName, applied: set[int]) -> list[Migration]:
    return [step for step in migrations(schema) if not step.contracts and step.number not in applied]


def _is_newer(schema: SchemaName, applied: set[int]) -> bool:
    return max(applied, default=0) > max(step.number for step in migrations(schema))


def _is_being_made(connection: Connection, schema: SchemaName) -> bool:
    row = connection.execute(f"SELECT in_force = 0 FROM {SCHEMAS[schema]}.protocol").fetchone()
    return row is not None and bool(row[0])


def _is_current_to_reader(connection: Connection, schema: SchemaName, owner: str | None) -> bool:
    """Return whether a reader has nothing to do."""
    with connection.transaction():
        connection.execute(SEARCH_PATH)
        row = connection.execute(_OWNER_BESIDE_READER, (SCHEMAS[schema],)).fetchone()
        if row is None or owner not in (None, row[0]) or _missing(schema, _applied(connection, schema)):
            return False
        return read_protocols(connection, schema).served.serves_to >= PROTOCOL.most


def _prepare_owner(connection: Connection, schema: SchemaName, address: str, owner: str | None) -> set[int]:
    """Become the owner; return the numbers of the steps that ran."""
    # Otherwise the session uses the database's encoding.
    connection.execute("SET client_encoding = 'UTF8'")
    with _refusals(address), connection.transaction():
        connection.execute("SET LOCAL lock_timeout = '5s'")
        connection.execute(SEARCH_PATH)
        connection.execute(_owner_script(schema, owner))
        connection.execute("SELECT set_config('role', current_setting('mqlayer.owner'), false)")
        applied = _applied(connection, schema)
        if _is_newer(schema, applied):
            check_schema(connection, schema, address)
        elif applied and not _is_being_made(connection, schema):
            refuse_unserved(read_protocols(connection, schema).served, schema, address)
        connection.execute(sql_source("owner/paths.sql"))
    return applied


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


def _run(connection: Connection, migration: Migration) -> bool:
    """Run a step and record it; a contract step only while every living process acts on its version."""
    with connection.transaction():
        connection.execute("SET LOCAL lock_timeout = '5s'")
        connection.execute(SEARCH_PATH)
        if migration.contracts and not _may_contract(connection, migration):
            return False
        connection.execute(migration.text)
        connection.execute(sql_source("owner/paths.sql"))
        if migration.number == 1:
            connection.execute(_table_text(migration.schema))
        failpoint("migrate.before_record")
        connection.execute(
            f"INSERT INTO {SCHEMAS[migration.schema]}.migration (number, name) VALUES (%s, %s)",
            (migration.number, migration.name),
        )
    return True


def _may_contract(connection: Connection, migration: Migration) -> bool:
    # With the row locked, a process that joins waits for the end of the step.
    connection.execute(f"SELECT FROM {SCHEMAS[migration.schema]}.protocol FOR UPDATE")
    facts = {"version": migration.protocol}
    return connection.execute(query(_ACTING_BEFORE[migration.schema]), facts).fetchone() is None


def _table_text(schema: SchemaName) -> str:
    return (
        f"CREATE TABLE {SCHEMAS[schema]}.migration (number int PRIMARY KEY, name text NOT NULL, "
        "at timestamptz NOT NULL DEFAULT now())"
    )


def _applied(connection: Connection, schema: SchemaName) -> set[int]:
    table = f"{SCHEMAS[schema]}.migration"
    row = connection.execute("SELECT to_regclass(%s)", (table,)).fetchone()
    if row is None or row[0] is None:
        return set()
    return {number for (number,) in connection.execute(f"SELECT number FROM {table}").fetchall()}
