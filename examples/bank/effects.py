"""What a message of the bank does: it moves one balance of the read model, in one transaction with the fence."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import msgspec
import psycopg
from psycopg_pool import ConnectionPool

import mqlayer
from mqlayer.errors import MqlayerError

TOPIC: Final = "bank.entries"
GROUP: Final = "ledger"
CONCURRENCY: Final = 4

Connection = psycopg.Connection[Any]


class Entry(msgspec.Struct):
    """What a message says: the change, the balance after it, and when it was published."""

    delta: int
    balance: int
    at: int


class ReadModel:
    """The balances that consumers rebuild; reached by a few connections, made at the first use."""

    def __init__(self, settings: mqlayer.Settings) -> None:
        # A stopped process must not keep its rows from the next one for longer than its lease.
        options = f"-c idle_in_transaction_session_timeout={int(settings.lease_s * 1000)}"
        self._pool: ConnectionPool[Connection] = ConnectionPool(
            settings.application_dsn(),
            kwargs={"autocommit": True, "options": options},
            configure=_name_session,
            min_size=0,
            max_size=CONCURRENCY,
            open=False,
        )

    def apply(self, key: str | None, entry: Entry, fence: Callable[[Connection], None]) -> None:
        """Move the balance of a key: fence and effect in one transaction."""
        with self._connection() as connection, connection.transaction():
            fence(connection)
            connection.execute("SELECT bank.apply_entry(%s, %s, %s, %s)", (key, entry.delta, entry.balance, entry.at))

    def note_refusal(self, key: str | None, refusal: MqlayerError) -> None:
        """Note that an effect or an acknowledgement was refused."""
        with self._connection() as connection:
            facts = (key, type(refusal).__name__)
            connection.execute("INSERT INTO bank.refusal (key, kind) VALUES (%s, %s)", facts)

    def close(self) -> None:
        """Let go of the connections."""
        self._pool.close()

    def _connection(self) -> AbstractContextManager[Connection]:
        self._pool.open()  # in the process that handles, and only the first time
        return self._pool.connection()


def session_name(pid: int) -> str:
    """Return what a process calls its sessions at the read model."""
    return f"bank {pid}"


def _name_session(connection: Connection) -> None:
    connection.execute("SELECT set_config('application_name', %s, false)", (session_name(os.getpid()),))
