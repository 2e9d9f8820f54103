"""The bank's consumers: every message moves one balance of the read model, once and in order, through the fence."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

import msgspec
import psycopg
from psycopg_pool import ConnectionPool

import mqlayer
from mqlayer.errors import FenceError

TOPIC: Final = "bank.entries"
GROUP: Final = "ledger"
CONCURRENCY: Final = 4

app = mqlayer.App()
# A stopped process must not keep its rows from the next owner for longer than its lease.
_options = f"-c idle_in_transaction_session_timeout={int(app.settings.lease_s * 1000)} -c application_name=bank"
_pool: ConnectionPool[psycopg.Connection[Any]] = ConnectionPool(
    app.settings.application_dsn(),
    kwargs={"autocommit": True, "options": _options},
    min_size=0,
    max_size=CONCURRENCY,
    open=False,
)


class Entry(msgspec.Struct):
    """What a message says: the change, the balance after it, and when it was published."""

    delta: int
    balance: int
    at: int


@app.consumer(TOPIC, group=GROUP, options=mqlayer.MemberOptions(concurrency=CONCURRENCY))
def apply(entry: Entry, ctx: mqlayer.Context) -> None:
    """Move the balance of the message's key: fence and effect in one transaction."""
    try:
        with _connection() as connection, connection.transaction():
            ctx.fence(connection)
            connection.execute(
                "SELECT bank.apply_entry(%s, %s, %s, %s)", (ctx.key, entry.delta, entry.balance, entry.at)
            )
    except FenceError as refusal:
        with _connection() as connection:
            facts = (ctx.key, type(refusal).__name__)
            connection.execute("INSERT INTO bank.refusal (key, kind) VALUES (%s, %s)", facts)
        raise


def _connection() -> AbstractContextManager[psycopg.Connection[Any]]:
    _pool.open()  # in the process that handles, and only the first time
    return _pool.connection()
