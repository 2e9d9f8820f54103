"""Grant, revoke and list rights of Postgres roles: `docs/design/access.md`.

`sql/rights/<right>.sql` holds privileges, the tables `granted` hold roles and scopes. A role keeps a privilege while
one of its rights needs it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Final, Literal, LiteralString

import psycopg
from psycopg import errors as pg_errors
from psycopg import sql

from mqlayer.domain.names import check_name
from mqlayer.errors import Conflict, InvalidInput, NotFound, PermissionDenied
from mqlayer.postgres.database import Connection, address_of, connect, driver_errors
from mqlayer.postgres.queries import query
from mqlayer.resources import sql_source

SchemaName = Literal["control", "application"]
SCHEMAS: Final[dict[SchemaName, str]] = {"control": "mqlayer", "application": "mqlayer_app"}


class Right(StrEnum):
    """A role's permission. Rights add up."""

    PUBLISH = "publish"
    CONSUME = "consume"
    RELAY = "relay"
    WORK = "work"
    VIEW = "view"
    ANALYZE = "analyze"
    OPERATE = "operate"
    MIGRATE = "migrate"


@dataclass(frozen=True, slots=True)
class Grant:
    """A role's right. `scope`: a topic or TOPIC/GROUP; empty for all."""

    role: str
    right: Right
    scope: str = ""


_STATEMENT: Final = re.compile(
    r"GRANT\s+([^;]+?)\s+ON\s+((?:SCHEMA |FUNCTION |SEQUENCE )?([a-z_]+)(?:\.(\w+))?)\s+TO\s+\{role\};"
)
_SCHEMA_OF: Final[dict[str, SchemaName]] = {
    "mqlayer": "control",
    "mqlayer_archive": "control",
    "mqlayer_app": "application",
}


@dataclass(frozen=True, slots=True)
class Privilege:
    """One GRANT of a right, as in SQL."""

    schema: SchemaName
    name: str
    privileges: str
    target: str


@cache
def privileges(right: Right) -> tuple[Privilege, ...]:
    """Return a right's privileges; `migrate` is membership in the owner instead."""
    if right is Right.MIGRATE:
        return ()
    found = _STATEMENT.findall(sql_source(f"rights/{right}.sql"))
    return tuple(
        Privilege(_SCHEMA_OF[namespace], name, " ".join(allowed.split()), target)
        for allowed, target, namespace, name in found
    )


def scopes_of(right: Right, topics: Sequence[str], groups: Sequence[str]) -> tuple[str, ...]:
    """Return a right's scopes, ("",) for no limit. Raises InvalidInput."""
    if topics and right is not Right.PUBLISH:
        raise InvalidInput(f"{right} can't be limited to topics: only publish can")
    if groups and right is not Right.CONSUME:
        raise InvalidInput(f"{right} can't be limited to groups: only consume can")
    for topic in topics:
        check_name("topic", topic)
    for group in groups:
        topic, found, name = group.partition("/")
        if not found:
            raise InvalidInput(f"{group!r} names no group: give TOPIC/GROUP")
        check_name("topic", topic)
        check_name("group", name)
    return tuple(topics) or tuple(groups) or ("",)


def grant(dsn: str, schema: SchemaName, role: str, right: Right, scopes: Iterable[str] = ("",)) -> None:
    """Grant a right. Idempotent. Raises InvalidInput, NotFound, PermissionDenied."""
    _refuse_schema_name(role)
    with _transaction(dsn, "mqlayer grant", right) as connection:
        _check_role(connection, role)
        _run(connection, grant_statements(schema, role, right, scopes))


def revoke(dsn: str, schema: SchemaName, role: str, right: Right, scopes: Collection[str] = ("",)) -> None:
    """Revoke scopes of a right, all for the empty scope.

    Raises NotFound, PermissionDenied, Conflict for a part of an unlimited right.
    """
    with _transaction(dsn, "mqlayer revoke", right) as connection:
        _check_role(connection, role)
        if "" not in scopes and (str(right), "") in _rows(connection, schema, role):
            raise Conflict(_WHOLE.format(role=role, right=right), _WHOLE_FIX.format(role=role, right=right))
        _run(connection, revoke_statements(schema, role, right, scopes))


def grant_statements(schema: SchemaName, role: str, right: Right, scopes: Iterable[str]) -> list[sql.Composed]:
    """Return a grant's statements, for one transaction. Raises InvalidInput."""
    _refuse_schema_name(role)
    if right is Right.MIGRATE:
        return [_membership(schema, "GRANT %I TO %I", role)]
    scopes = tuple(scopes)
    put = "INSERT INTO {} (role, privilege, scope) VALUES ({}::pg_catalog.regrole, {}, {}) ON CONFLICT DO NOTHING"
    rows = [sql.SQL(put).format(*_row(schema, role, right, scope)) for scope in scopes]
    return _privileges(schema, role, right, limited="" not in scopes) + rows


def revoke_statements(schema: SchemaName, role: str, right: Right, scopes: Iterable[str]) -> list[sql.Composed]:
    """Return a revoke's statements; other rights keep their privileges."""
    if right is Right.MIGRATE:
        return [_membership(schema, "REVOKE %I FROM %I", role)]
    scopes = tuple(scopes)
    drop = "DELETE FROM {} WHERE role = {}::pg_catalog.regrole AND privilege = {} AND {} IN ('', scope)"
    rows = [sql.SQL(drop).format(*_row(schema, role, right, scope)) for scope in scopes]
    whole = [] if "" in scopes else [_refusal_of_whole(schema, role, right)]
    gone = [_spelled("REVOKE {} ON {} FROM {}", p, role) for p in privileges(right) if p.schema == schema]
    return whole + rows + gone + [_regrant(schema, role, {p.target for p in privileges(right)})]


def _run(connection: Connection, statements: Iterable[sql.Composed]) -> None:
    # Some 150 at once: one question and answer each would take as long again.
    connection.execute(sql.SQL("; ").join(statements), prepare=False)


def grants(dsn: str, schema: SchemaName) -> list[Grant]:
    """Return all grants and the owner's members, by role."""
    with connect(dsn) as connection, driver_errors(address_of(dsn)):
        rows = connection.execute(sql.SQL(_LISTED).format(_table(schema))).fetchall()
        members = connection.execute(_MEMBERS, {"schema": SCHEMAS[schema]}).fetchall()
    found = [Grant(role, Right(privilege), scope) for role, privilege, scope in rows]
    found += [Grant(role, Right.MIGRATE) for (role,) in members]
    return sorted(found, key=lambda grant: (grant.role, grant.right, grant.scope))


def regrant_all(connection: Connection, schema: SchemaName) -> None:
    """Grant all rights again after migrations; delete dropped roles."""
    connection.execute(
        sql.SQL("DELETE FROM {} g WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.oid = g.role)").format(
            _table(schema)
        )
    )
    rows = connection.execute(sql.SQL(_LISTED).format(_table(schema))).fetchall()
    for role in {row[0] for row in rows}:
        for statement in _all_of(schema, role, [(right, scope) for name, right, scope in rows if name == role]):
            connection.execute(statement)


def require(connection: Connection, schema: SchemaName, right: Right, scope: str = "", *others: Right) -> None:
    """Raise PermissionDenied, with the helpful command, unless the connection's role has this right or one of `others`,
    for the scope or for all."""
    name = "right_held" if schema == "control" else "application_right_held"
    facts = {"right": right, "scope": scope, "others": list(others)}
    _require(connection, query(name), facts, right, scope)


def require_change(connection: Connection, schema: SchemaName, *others: Right, group: str | None = None) -> None:
    """Raise PermissionDenied unless the connection's role may operate, or has one of `others`.

    In the control schema, the right to consume `group` (TOPIC/GROUP; empty: any) suffices. Ask before looking for work.
    """
    name = "change_allowed" if schema == "control" else "application_change_allowed"
    facts = {"rights": [Right.OPERATE, *others], "group": group}
    _require(connection, query(name), facts, Right.OPERATE, "")


def _require(connection: Connection, asked: Any, facts: dict[str, Any], right: Right, scope: str) -> None:
    try:
        row = connection.execute(asked, facts).fetchone()
    except pg_errors.InsufficientPrivilege as error:
        raise _denied(connection, connection.info.user, right, scope) from error
    if row is None or not row[1]:
        raise _denied(connection, connection.info.user if row is None else row[0], right, scope)


def _denied(connection: Connection, role: str, right: Right, scope: str) -> PermissionDenied:
    limit = "" if not scope else f" --group {scope}" if "/" in scope else f" --topic {scope}"
    address = f"postgres at {connection.info.host}:{connection.info.port}/{connection.info.dbname}"
    reason = f"role {role!r} lacks the right to {f'{right} {scope}'.strip()}"
    return PermissionDenied(address, reason, f"mqlayer grant {right} {role}{limit}")


def ensure_login(dsn: str, role: str, password: str, *, makes_databases: bool = False) -> bool:
    """Create a login role or set its password; return whether it is new. The server sees only a hash.

    Raises InvalidInput.
    """
    _refuse_schema_name(role)
    with connect(dsn, application="mqlayer grant") as connection, driver_errors(address_of(dsn)):
        secret = connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
        there = connection.execute("SELECT 1 FROM pg_catalog.pg_roles WHERE rolname = %s", (role,)).fetchone()
        verb, more = "ALTER" if there else "CREATE", " CREATEDB" if makes_databases else ""
        statement = sql.SQL(f"{verb} ROLE {{}} LOGIN PASSWORD {{}}{more}")
        with _refused_with(dsn, "may not make a role, nor set its password", _OWNER_GIVER):
            connection.execute(statement.format(sql.Identifier(role), sql.Literal(secret)))
    return not there


_LISTED: Final = "SELECT r.rolname, g.privilege, g.scope FROM {} g JOIN pg_catalog.pg_roles r ON r.oid = g.role"
_MEMBERS: Final = """
    SELECT r.rolname FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_auth_members m ON m.roleid = n.nspowner
    JOIN pg_catalog.pg_roles r ON r.oid = m.member WHERE n.nspname = %(schema)s"""
_WHOLE: Final = "{role} may {right} without limits, and would go on to"
_WHOLE_FIX: Final = "mqlayer revoke {right} {role}, then grant what it is to keep"
_GIVER: Final = (
    "let a superuser, or a member of the schemas' owner, run this; as one of these: mqlayer grant migrate {}"
)
_OWNER_GIVER: Final = "let a superuser, or a role with CREATEROLE, run this"


@contextmanager
def _transaction(dsn: str, application: str, right: Right) -> Iterator[Connection]:
    with connect(dsn, application=application) as connection, driver_errors(address_of(dsn)):
        fix = _OWNER_GIVER if right is Right.MIGRATE else _GIVER.format(connection.info.user)
        with _refused_with(dsn, "may not give or take rights", fix), connection.transaction():
            yield connection


@contextmanager
def _refused_with(dsn: str, what: str, fix: str) -> Iterator[None]:
    try:
        yield
    except pg_errors.InsufficientPrivilege as error:
        reason = f"this role {what} ({error.diag.message_primary})"
        raise PermissionDenied(address_of(dsn), reason, fix) from error


def _table(schema: SchemaName) -> sql.Identifier:
    return sql.Identifier(SCHEMAS[schema], "granted")


def _row(schema: SchemaName, role: str, right: Right, scope: str) -> tuple[sql.Composable, ...]:
    # regrole parses its literal as a name, so quote it.
    quoted = '"' + role.replace('"', '""') + '"'
    return _table(schema), sql.Literal(quoted), sql.Literal(str(right)), sql.Literal(scope)


def _privileges(
    schema: SchemaName, role: str, right: Right, *, limited: bool, targets: set[str] | None = None
) -> list[sql.Composed]:
    """Publishing to named topics needs the outbox: Redis users know no topics."""
    given_for_all = ("publish_any", "consume_any") if limited else ()
    if right is Right.PUBLISH and limited and schema == "control":
        return []
    return [
        _spelled("GRANT {} ON {} TO {}", privilege, role)
        for privilege in privileges(right)
        if privilege.schema == schema
        and privilege.name not in given_for_all
        and (targets is None or privilege.target in targets)
    ]


def _spelled(pattern: LiteralString, privilege: Privilege, role: str) -> sql.Composed:
    # From a file of this package, never from data.
    words: tuple[Any, Any] = (privilege.privileges, privilege.target)
    return sql.SQL(pattern).format(*(sql.SQL(word) for word in words), sql.Identifier(role))


def _all_of(schema: SchemaName, role: str, rows: Iterable[tuple[str, str]]) -> list[sql.Composed]:
    limits: dict[Right, list[str]] = {}
    for right, scope in rows:
        limits.setdefault(Right(right), []).append(scope)
    return [
        statement
        for right, scopes in limits.items()
        for statement in _privileges(schema, role, right, limited="" not in scopes)
    ]


def _rows(connection: Connection, schema: SchemaName, role: str) -> list[tuple[str, str]]:
    rows = connection.execute(sql.SQL(_LISTED).format(_table(schema)) + sql.SQL(" WHERE r.rolname = %s"), (role,))
    return [(right, scope) for _, right, scope in rows.fetchall()]


def _membership(schema: SchemaName, pattern: str, role: str) -> sql.Composed:
    body = sql.SQL(
        "BEGIN EXECUTE pg_catalog.format({}, (SELECT pg_catalog.pg_get_userbyid(nspowner) FROM pg_catalog.pg_namespace "
        "WHERE oid = {}::pg_catalog.regnamespace), {}); END"
    )
    return _block(body.format(sql.Literal(pattern), sql.Literal(SCHEMAS[schema]), sql.Literal(role)))


def _refusal_of_whole(schema: SchemaName, role: str, right: Right) -> sql.Composed:
    text, fix = (sql.Literal(text.format(role=role, right=right)) for text in (_WHOLE, _WHOLE_FIX))
    body = sql.SQL("BEGIN IF {} THEN RAISE EXCEPTION USING MESSAGE = {}, HINT = {}; END IF; END")
    return _block(body.format(_has(schema, role, right, whole=True), text, fix))


def _regrant(schema: SchemaName, role: str, targets: set[str]) -> sql.Composed:
    found: list[sql.Composable] = []
    for right in Right:
        for limited in (False, True):
            if again := _privileges(schema, role, right, limited=limited, targets=targets):
                condition = _has(schema, role, right, whole=not limited)
                found.append(sql.SQL("IF {} THEN {}; END IF; ").format(condition, sql.SQL("; ").join(again)))
    return _block(sql.SQL("BEGIN {}END").format(sql.Composed(found)))


def _has(schema: SchemaName, role: str, right: Right, *, whole: bool) -> sql.Composed:
    condition = (
        "EXISTS (SELECT FROM {} WHERE role = {}::pg_catalog.regrole AND privilege = {} AND {} IN (scope, 'any'))"
    )
    return sql.SQL(condition).format(*_row(schema, role, right, "" if whole else "any"))


def _block(body: sql.Composed) -> sql.Composed:
    # A literal, not dollar quotes, which a role's name could contain.
    return sql.SQL("DO {}").format(sql.Literal(body.as_string(None)))


def _refuse_schema_name(role: str) -> None:
    # A table named without a schema is looked for in the schema of the role's name first.
    if role in _SCHEMA_OF:
        raise InvalidInput(
            f"a role {role} would find mqlayer's tables before its own, as its name is a schema's: take another name"
        )


def _check_role(connection: psycopg.Connection[Any], role: str) -> None:
    if not connection.execute("SELECT 1 FROM pg_catalog.pg_roles WHERE rolname = %s", (role,)).fetchone():
        raise NotFound("role", role, f"make it: CREATE ROLE {role} LOGIN, or mqlayer grant … --password-file FILE")
