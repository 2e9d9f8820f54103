"""Parse DSNs with libpq; show host, port and database only."""

from __future__ import annotations

import ipaddress
import os
import re
from functools import lru_cache
from typing import Any, Final

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict

from mqlayer.errors import InvalidInput
from mqlayer.redaction import register_secrets

UNREADABLE: Final = (
    "the DSN of Postgres can't be parsed: give postgresql://user@host:port/database, or key=value pairs; write "
    "@ : / ? # % and blanks in a password as %40 %3A %2F %3F %23 %25 %20, or quote the value"
)
# A scheme holds no secret.
_SCHEME: Final = re.compile(r"(?!postgres(?:ql)?:)([a-z][a-z0-9+]{1,30})://")
_SCHEMES: Final = ("postgresql://", "postgres://")
_HOST: Final = re.compile(r"[\w.-]*|/[^@\s]*")


def parse_dsn(dsn: str) -> dict[str, Any]:
    """Parse a DSN. Raises InvalidInput, which never shows it.

    Refuses a bare `@` or `/` in a password: libpq would misread it as host or database.
    """
    parts = _parse(dsn)
    if parts is None:
        scheme = _SCHEME.match(dsn)
        raise InvalidInput(UNREADABLE if scheme is None else _other_scheme(scheme[1]))
    register_secrets(*(str(value) for name, value in parts.items() if name in _secret_names()))
    return parts


def _other_scheme(scheme: str) -> str:
    name, plus, driver = scheme.partition("+")
    hint = f"leave out {plus}{driver}, which is SQLAlchemy's" if plus and name in ("postgresql", "postgres") else ""
    return f"the DSN of Postgres begins with {scheme}://: {hint or 'give postgresql://user@host:port/database'}"


def address_of(dsn: str) -> str:
    """Return host, port and database, or the service that decides what the DSN leaves open."""
    parts = _parse(dsn)
    if parts is None:
        return "postgres (the DSN can't be parsed)"
    service = parts.get("service") or os.environ.get("PGSERVICE")
    host, port = parts.get("host") or parts.get("hostaddr"), parts.get("port")
    if not service:
        host = host or os.environ.get("PGHOST") or os.environ.get("PGHOSTADDR") or "localhost"
        port = port or os.environ.get("PGPORT") or 5432
    elif not host:
        # libpq reads the address from its file.
        database = f", database {parts['dbname']}" if parts.get("dbname") else ""
        return f"postgres of service {_shown(service)}{database}"
    return f"postgres at {_shown(host)}{f':{port}' if port else ''}/{parts.get('dbname') or ''}"


def _shown(name: str) -> str:
    return name if all(map(_is_host, name.split(","))) else "(a name that can't be shown)"


def _parse(dsn: str) -> dict[str, Any] | None:
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.Error:
        # Its text quotes the DSN.
        return None
    hosts, ports = str(parts.get("host", "")).split(","), str(parts.get("port", "")).split(",")
    meant = _is_clear(dsn) and all(_is_host(host) for host in hosts)
    return parts if meant and all(port == "" or port.isdecimal() for port in ports) else None


def _is_clear(dsn: str) -> bool:
    if not dsn.startswith(_SCHEMES):
        return True
    authority, _, rest = dsn.partition("://")[2].partition("/")
    before, at, _ = authority.partition("@")
    return authority.count("@") <= 1 and not (at and "?" in before) and "@" not in rest.partition("?")[0]


def _is_host(host: str) -> bool:
    if _HOST.fullmatch(host):
        return True
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


@lru_cache(maxsize=1)
def _secret_names() -> frozenset[str]:
    return frozenset(option.keyword.decode() for option in pq.Conninfo.get_defaults() if option.dispchar == b"*")
