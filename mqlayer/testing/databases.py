"""Databases for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from psycopg import errors as pg_errors

from mqlayer.errors import PermissionDenied
from mqlayer.postgres.dsn import address_of, parse_dsn
from mqlayer.stack.databases import PostgresDatabases

_WAY_OUT: Final = "name one with CREATEDB, or unset MQLAYER_DSN: mqlayer_stack runs servers of its own then"


def make_database(dsn: str) -> bool:
    """Make the database of a DSN; return False where it exists. Raises PermissionDenied, StoreUnavailable."""
    name, server = str(parse_dsn(dsn).get("dbname", "")), PostgresDatabases(dsn)
    if not name or server.has_database(name):
        return False
    with database_rights(dsn):
        server.create_database(name)
    return True


@contextmanager
def database_rights(dsn: str) -> Iterator[None]:
    """Name the way out for a role that may not make databases."""
    try:
        yield
    except pg_errors.InsufficientPrivilege as error:
        reason = "this role may not make databases for tests"
        raise PermissionDenied(address_of(dsn), reason, _WAY_OUT) from error
