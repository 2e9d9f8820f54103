"""Write a Django transaction's messages right before COMMIT.

Each message's marker in Django's `on_commit` list follows rollbacks. The wrapped `commit` first writes messages
whose markers remain. Wrapped savepoint methods cover `transaction.savepoint()`, which the list ignores.
"""

from __future__ import annotations

from typing import Any

from mqlayer.errors import InvalidInput
from mqlayer.outbox.batch_insert import send
from mqlayer.outbox.outbox_message import OutboxMessage
from mqlayer.postgres.caller_connections import check_dialect


class MessageMarker:
    """A message in Django's `on_commit` list."""

    def __init__(self, message: OutboxMessage, number: int) -> None:
        self.message, self.number = message, number

    def __call__(self) -> None:
        """Do nothing: the message is written already."""


class DjangoHooks:
    """Replaces methods of a Django connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._commit, self._savepoint = connection.commit, connection.savepoint
        self._savepoint_rollback = connection.savepoint_rollback
        self._number = 0
        # Savepoints, with the number of the last message before each. An unknown one predates these hooks.
        self._savepoints: dict[str, int] = {}
        connection.commit, connection.savepoint = self.commit, self.savepoint
        connection.savepoint_rollback = self.savepoint_rollback

    def add(self, message: OutboxMessage) -> None:
        """Add a message's marker."""
        self._number += 1
        self._connection.on_commit(MessageMarker(message, self._number))

    def commit(self) -> None:
        """Write the messages and commit; roll back on failure."""
        functions = [entry[1] for entry in self._connection.run_on_commit]
        self._savepoints.clear()
        try:
            send(self._connection, [function.message for function in functions if isinstance(function, MessageMarker)])
        except BaseException:
            # `atomic` rolls back only for database errors.
            self._connection.rollback()
            raise
        self._commit()

    def savepoint(self) -> Any:
        """Create a savepoint."""
        name = self._savepoint()
        if name:
            self._savepoints[name] = self._number
        return name

    def savepoint_rollback(self, name: str) -> None:
        """Roll back; discard later messages."""
        self._savepoint_rollback(name)
        last = self._savepoints.get(name, 0)
        connection = self._connection
        connection.run_on_commit = [
            entry
            for entry in connection.run_on_commit
            if not isinstance(entry[1], MessageMarker) or entry[1].number <= last
        ]


def collected(connection: Any) -> list[OutboxMessage]:
    """Return what the open transaction has collected."""
    markers = (entry[1] for entry in connection.run_on_commit)
    return [marker.message for marker in markers if isinstance(marker, MessageMarker)]


def of_alias(alias: str) -> Any:
    """Return this thread's Django connection. Raises InvalidInput."""
    try:
        from django.db import connections
        from django.utils.connection import ConnectionDoesNotExist
    except ImportError as error:
        raise InvalidInput(f"{alias!r} would be an alias of a Django connection, but Django is not here") from error
    try:
        return connections[alias]
    except ConnectionDoesNotExist as error:
        raise InvalidInput(f"Django's settings have no connection {alias!r}") from error


def recognises(connection: Any) -> bool:
    """Whether an object is a Django connection."""
    return hasattr(connection, "in_atomic_block") and hasattr(connection, "run_on_commit")


def publish(connection: Any, message: OutboxMessage) -> None:
    """Collect a message for the open `atomic` block, or write it."""
    check_dialect(connection.vendor)
    if not connection.in_atomic_block:
        send(connection, [message])
        return
    hooks = getattr(connection.commit, "__self__", None)
    if not isinstance(hooks, DjangoHooks):
        hooks = DjangoHooks(connection)
    hooks.add(message)
