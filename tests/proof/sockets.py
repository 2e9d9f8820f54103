"""Postgres by its Unix socket."""

from __future__ import annotations

import psycopg
from psycopg.conninfo import make_conninfo


def by_socket(dsn: str) -> str:
    """Return the DSN that leads to the same database by the server's socket; the same one if it has none."""
    with psycopg.connect(dsn) as connection:
        ((directory,),) = connection.execute("SHOW unix_socket_directories").fetchall()
    return make_conninfo(dsn, host=directory) if directory else dsn
