"""Write a SQLAlchemy transaction's messages right before COMMIT.

Connection events also cover Sessions. Statements reveal savepoints: SQLAlchemy's events omit new names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Final
from weakref import WeakKeyDictionary

from mqlayer.errors import InvalidInput
from mqlayer.outbox.batch_insert import statements_for
from mqlayer.outbox.outbox_message import OutboxMessage
from mqlayer.postgres.caller_connections import arguments_on, caller_errors, check_dialect, is_autocommit

_SAVEPOINT_STATEMENT: Final = re.compile(
    r"\s*(SAVEPOINT|RELEASE|ROLLBACK(?:\s+WORK|\s+TRANSACTION)?\s+TO)\s+(?:SAVEPOINT\s+)?(\"[^\"]+\"|\w+)",
    re.IGNORECASE,
)
_numbers = count(1)


class SqlalchemyTransaction:
    """An open transaction's messages, each with its savepoints.

    Unknown savepoints are older than all messages.
    """

    def __init__(self) -> None:
        self.messages: list[tuple[OutboxMessage, frozenset[int]]] = []
        self._open: list[tuple[str, int]] = []

    def add(self, message: OutboxMessage) -> None:
        """Add a message."""
        self.messages.append((message, frozenset(number for _, number in self._open)))

    def on_statement(self, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        """Track savepoints."""
        match = _SAVEPOINT_STATEMENT.match(statement)
        if match is None:
            return
        word, name = match[1].upper(), match[2]
        if word == "SAVEPOINT":
            self._open.append((name, next(_numbers)))
            return
        at = max((index for index, (other, _) in enumerate(self._open) if other == name), default=-1)
        if word == "RELEASE":
            if at >= 0:
                del self._open[at:]
            return
        number = self._open[at][1] if at >= 0 else None
        self.messages = [each for each in self.messages if number is not None and number not in each[1]]
        del self._open[at + 1 :]

    def on_rollback(self, *_: Any) -> None:
        """Discard all messages."""
        self.messages, self._open = [], []

    def on_commit(self, connection: Any) -> None:
        """Write the messages."""
        self._write(connection, connection.connection.rollback)

    def on_prepare(self, connection: Any, _xid: Any) -> None:
        """Write the messages; SQLAlchemy rolls back a failed first phase."""
        self._write(connection, lambda: None)

    def on_commit_twophase(self, connection: Any, xid: Any, is_prepared: Any) -> None:
        """Write the messages, without a first phase."""
        if not is_prepared:
            roll_back = connection.dialect.do_rollback_twophase
            self._write(connection, partial(roll_back, connection, xid, is_prepared=False))

    def _write(self, connection: Any, roll_back: Callable[[], object]) -> None:
        messages = [message for message, _ in self.messages]
        self.on_rollback()
        if not messages:
            return
        try:
            with caller_errors(connection):
                for statement in statements_for(messages):
                    connection.exec_driver_sql(*arguments_on(connection, statement))
        except BaseException:
            # SQLAlchemy assumes that the server ended a transaction whose COMMIT failed; this one is open.
            with suppress(Exception):
                roll_back()
            raise


_collectors: Final[WeakKeyDictionary[Any, SqlalchemyTransaction]] = WeakKeyDictionary()


def recognises(connection: Any) -> bool:
    """Whether an object is SQLAlchemy's."""
    return any(base.__module__.startswith("sqlalchemy.") for base in type(connection).__mro__)


def publish(connection: Any, message: OutboxMessage) -> None:
    """Collect a message for a Session's or Connection's transaction, new or open."""
    if hasattr(connection, "run_sync"):
        raise InvalidInput(f"a {type(connection).__name__} is asynchronous: await outbox.apublish(…)")
    if not hasattr(connection, "connection"):
        raise InvalidInput(f"can't publish on a {type(connection).__name__}: give a Session or a Connection")
    core = connection.connection() if callable(connection.connection) else connection
    check_dialect(core.dialect.name)
    if is_autocommit(core):
        # Without a commit() to wait for, write at once.
        with caller_errors(core):
            for statement in statements_for([message]):
                core.exec_driver_sql(*arguments_on(core, statement))
        return
    if not core.in_transaction():
        core.begin()
    collector_of(core).add(message)


def collected(connection: Any) -> list[OutboxMessage]:
    """Return what the open transaction has collected."""
    core = connection.connection() if callable(connection.connection) else connection
    collector = _collectors.get(core)
    return [] if collector is None else [message for message, _ in collector.messages]


def collector_of(core: Any) -> SqlalchemyTransaction:
    """Return a Connection's collector, created if new."""
    collector = _collectors.get(core)
    if collector is None:
        from sqlalchemy import event

        collector = _collectors[core] = SqlalchemyTransaction()
        event.listen(core, "before_cursor_execute", collector.on_statement)
        event.listen(core, "rollback", collector.on_rollback)
        event.listen(core, "commit", collector.on_commit)
        event.listen(core, "prepare_twophase", collector.on_prepare)
        event.listen(core, "commit_twophase", collector.on_commit_twophase)
        event.listen(core, "rollback_twophase", collector.on_rollback)
    return collector
