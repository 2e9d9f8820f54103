"""Two handlers for `mqlayer analytics shadow`: the one in production, and the one that is to replace it."""

from __future__ import annotations

import psycopg

import mqlayer

DSN = mqlayer.Settings().application_dsn()


def book(body: bytes, ctx: mqlayer.Context) -> None:
    """Book each amount."""
    with psycopg.connect(DSN) as connection:
        ctx.fence(connection)
        connection.execute("INSERT INTO entry (owner, amount) VALUES (%s, %s)", [ctx.key, int(body)])


def book_positive(body: bytes, ctx: mqlayer.Context) -> None:
    """Book positive amounts only."""
    with psycopg.connect(DSN) as connection:
        ctx.fence(connection)
        if int(body) > 0:
            connection.execute("INSERT INTO entry (owner, amount) VALUES (%s, %s)", [ctx.key, int(body)])
