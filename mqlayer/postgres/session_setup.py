"""Set up the library's sessions: `docs/design/access.md`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import psycopg
from psycopg import sql

from mqlayer.errors import ConfigurationRefused
from mqlayer.postgres.queries import query
from mqlayer.settings import ConnectionOptions, SessionLimits

AnyConnection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"

SETTINGS: Final[Mapping[str, str]] = {
    "array_nulls": "on",
    "bytea_output": "hex",
    "client_min_messages": "notice",
    "DateStyle": "ISO",
    "default_transaction_deferrable": "off",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "exit_on_error": "off",
    "extra_float_digits": "1",
    "idle_session_timeout": "0",
    "IntervalStyle": "postgres",
    "jit": "off",
    "plan_cache_mode": "auto",
    "quote_all_identifiers": "off",
    "row_security": "on",
    "search_path": "pg_catalog, pg_temp",
    "standard_conforming_strings": "on",
    # Only if off, see `_assignment`: keep a stricter wait for standbys.
    "synchronous_commit": "on",
    "TimeZone": "UTC",
    "transform_null_equals": "off",
}
"""Read committed: statements after a lock must see the latest commits."""
SOME_SERVERS_HAVE: Final[Mapping[str, str]] = {
    "plpgsql.extra_errors": "none",
    "restrict_nonsystem_relation_kind": "",
    "transaction_timeout": "0",
}
"""Set only if present."""
READING: Final[Mapping[str, str]] = {
    "default_transaction_isolation": "repeatable read",
    "default_transaction_read_only": "on",
    "enable_nestloop": "off",
}
"""One snapshot per transaction, no writes; stale statistics must not choose nested loops."""
NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "array_nulls": ("on",),
    "DateStyle": ("ISO", "ISO, DMY", "ISO, MDY", "ISO, YMD"),
    "default_transaction_isolation": ("read committed",),
    "default_transaction_read_only": ("off",),
    "exit_on_error": ("off",),
    "extra_float_digits": ("1", "0", "2", "3"),
    "IntervalStyle": ("postgres",),
    "row_security": ("on",),
    "standard_conforming_strings": ("on",),
    "synchronous_commit": ("on", "local", "remote_write", "remote_apply"),
    "transform_null_equals": ("off",),
}
"""Fit defaults of shared sessions, best first."""

OLDEST_POSTGRES: Final = 15
_NONE: Final = SessionLimits(0, 0, 0)
_SERVING: Final = SessionLimits(60, 30, 60)
_COMMAND: Final = SessionLimits(0, 60, 600)
LIMITS: Final[Mapping[str, SessionLimits]] = {
    "mqlayer consumer": _SERVING,
    "mqlayer receiver": _SERVING,
    "mqlayer producer": _SERVING,
    # It may read through an outbox, and holds a node's row while it resends.
    "mqlayer relay": SessionLimits(300, 30, 600),
    "mqlayer worker": SessionLimits(3600, 60, 600),
    "mqlayer exporter": SessionLimits(30, 5, 60),
    "mqlayer routes": _NONE,
    # It inspects these settings, and limits itself.
    "mqlayer doctor": SessionLimits(),
    "mqlayer migrate": _NONE,
}
"""By kind of process; others are commands, with unlimited statements."""


class ServerSession(NamedTuple):
    """Whether a connection owns its session; its first server process."""

    own: bool
    server_pid: int


_sessions: Final[WeakKeyDictionary[AnyConnection, ServerSession]] = WeakKeyDictionary()


def set_up(connection: AnyConnection, options: ConnectionOptions, *, application: str, address: str) -> ServerSession:
    """Set up an autocommit connection's session, or check a shared one.

    A pooler reports its own process id at connecting. Raises ConfigurationRefused for unfit defaults, an old server.
    """
    _refuse_old(connection.info.server_version, address)
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    wanted = {
        **SOME_SERVERS_HAVE,
        **SETTINGS,
        **(READING if options.reads_only else {}),
        **_limits(options, application),
        **({"role": options.role} if options.role else {}),
    }
    # Nothing that a pooler must keep apart: no parameters, not prepared.
    setting = _assigned(tuple(wanted.items())) + _if_own(connection, options)
    row = connection.execute(setting, prepare=False).fetchone()
    if row is None and options.role:
        raise refuse_pooled(options, address, f"the role {options.role}")
    session = _sessions[connection] = (
        ServerSession(True, row[0]) if row else _shared(connection, options, wanted, address)
    )
    return session


def _refuse_old(number: int, address: str) -> None:
    # A pooler may tell no version.
    if 0 < number < 10_000 * OLDEST_POSTGRES:
        shown = f"this is Postgres {number // 10_000}.{number % 10_000}"
        raise ConfigurationRefused(address, "", shown, f"mqlayer needs Postgres {OLDEST_POSTGRES} or later")


@cache
def _assigned(wanted: tuple[tuple[str, str], ...]) -> bytes:
    """Return the statement that sets everything; its row begins with the server process.

    Names are qualified, as it sets `search_path`.
    """
    each = sql.SQL(", ").join(_assignment(name, value) for name, value in wanted)
    text = sql.SQL("SELECT pg_catalog.pg_backend_pid(), pg_catalog.num_nonnulls({})").format(each)
    return text.as_string(None).encode()


def _assignment(name: str, value: str) -> sql.Composed:
    assigned = sql.SQL("pg_catalog.set_config({}, {}, false)").format(name, value)
    found = sql.SQL("pg_catalog.current_setting({}, true)").format(name)
    if name in SOME_SERVERS_HAVE:
        return sql.SQL("CASE WHEN {} IS NOT NULL THEN {} END").format(found, assigned)
    if name == "synchronous_commit":
        return sql.SQL("CASE WHEN {} OPERATOR(pg_catalog.=) 'off' THEN {} END").format(found, assigned)
    return assigned


def _if_own(connection: AnyConnection, options: ConnectionOptions) -> bytes:
    if options.pooled_by_session:
        return b""
    return b" WHERE pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) %d" % connection.info.backend_pid


def _shared(
    connection: AnyConnection, options: ConnectionOptions, wanted: Mapping[str, str], address: str
) -> ServerSession:
    # A prepared statement exists in one server session only.
    connection.prepare_threshold = connection.prepare_threshold if options.pooler_prepares else None
    row = connection.execute(query("session_found"), {"names": list(wanted)}, prepare=False).fetchone()
    server_pid, found = row or (0, [])
    _refuse_unfit(dict(zip(wanted, found, strict=True)), address)
    return ServerSession(False, server_pid)


def is_own(connection: AnyConnection) -> bool:
    """Whether the session outlives a statement."""
    session = _sessions.get(connection)
    return session is None or session.own


def is_direct(connection: AnyConnection) -> bool:
    """Whether no pooler is between."""
    session = _sessions.get(connection)
    return session is None or session.server_pid == connection.info.backend_pid


def refuse_moved(connection: AnyConnection, address: str) -> bool:
    """Check that a promised own session behind a pooler is unchanged; False without query for others. Raises
    ConfigurationRefused."""
    session = _sessions.get(connection)
    if session is None or not session.own or is_direct(connection):
        return False
    row = connection.execute("SELECT pg_catalog.pg_backend_pid()", prepare=False).fetchone()
    if row is not None and row[0] != session.server_pid:
        reason = "a pooler that keeps one server connection for each of ours (this one does not): unset it"
        raise ConfigurationRefused(address, "MQLAYER_POOLER", "session", reason)
    return True


def refuse_pooled(options: ConnectionOptions, address: str, purpose: str) -> ConfigurationRefused:
    """Return the error for a pooled connection."""
    wanted = (
        f"a direct connection for {purpose}: set {options.direct_setting} to the server's own address, or "
        "MQLAYER_POOLER=session if the pooler keeps one server connection for each of ours"
    )
    return ConfigurationRefused(address, "the way to it", "through a pooler", wanted)


def reading_options() -> str:
    """Return other drivers' options for read-only sessions."""
    unlimited = {"statement_timeout": "0", "lock_timeout": "0", "idle_in_transaction_session_timeout": "0"}
    # Drivers set these themselves.
    theirs = ("DateStyle", "TimeZone")
    wanted = {name: value for name, value in {**SETTINGS, **READING, **unlimited}.items() if name not in theirs}
    return " ".join(f"-c {name}={value}" for name, value in zip(wanted, map(_escaped, wanted.values()), strict=True))


def _escaped(value: str) -> str:
    return value.replace(" ", "\\ ")


def _limits(options: ConnectionOptions, application: str) -> dict[str, str]:
    kind, given = LIMITS.get(application, _COMMAND), options.limits
    if kind == SessionLimits():
        return {}
    limits = {
        "statement_timeout": (given.statement_s, kind.statement_s),
        "lock_timeout": (given.lock_s, kind.lock_s),
        "idle_in_transaction_session_timeout": (given.idle_in_transaction_s, kind.idle_in_transaction_s),
    }
    return {
        name: f"{1000 * (usual or 0 if wanted is None else wanted):.0f}" for name, (wanted, usual) in limits.items()
    }


def _refuse_unfit(found: Mapping[str, str], address: str) -> None:
    for name, fit in NEEDED.items():
        if found[name] not in fit:
            change = f"ALTER ROLE … SET {name} = '{fit[0]}', and RECONNECT in the pooler"
            fix = f"{fit[0]!r} where a pooler lends its sessions: {change}"
            raise ConfigurationRefused(address, name, found[name], fix)
