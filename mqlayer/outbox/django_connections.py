"""Collecting a Django transaction's messages, to write them right before its COMMIT.

`on_commit` runs after COMMIT, too late. But Django keeps its list of such functions over rollbacks, so each message
puts a marker there; and the connection's own `commit`, which `atomic` calls at the end of the outermost block, is
wrapped: it writes the messages whose markers are still in the list, then commits. Django's list knows the savepoints of
`atomic` only, so those of `transaction.savepoint()` are followed here as well. Django is imported only for an alias.
"""

from __future__ import annotations

from typing import Any

from mqlayer.errors import InvalidInput
from mqlayer.outbox.batch_insert import send
from mqlayer.outbox.outbox_message import OutboxMessage


class MessageMarker:
    """Stands for a message in Django's list of functions to run after COMMIT."""

    def __init__(self, message: OutboxMessage, number: int) -> None:
        self.message, self.number = message, number

    def __call__(self) -> None:
        """Do nothing: the message was written before the COMMIT."""


class DjangoHooks:
    """What a Django connection calls in place of its own methods, from its first message on."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._commit, self._savepoint = connection.commit, connection.savepoint
        self._savepoint_rollback = connection.savepoint_rollback
        self._number = 0
        # Savepoints with the number of the last message before each. One that is not here is older than our hooks.
        self._savepoints: dict[str, int] = {}
        connection.commit, connection.savepoint = self.commit, self.savepoint
        connection.savepoint_rollback = self.savepoint_rollback

    def add(self, message: OutboxMessage) -> None:
        """Put a message's marker into Django's list."""
        self._number += 1
        self._connection.on_commit(MessageMarker(message, self._number))

    def commit(self) -> None:
        """Write what was collected and commit; where writing fails, roll back and raise."""
        functions = [entry[1] for entry in self._connection.run_on_commit]
        self._savepoints.clear()
        try:
            send(self._connection, [function.message for function in functions if isinstance(function, MessageMarker)])
        except BaseException:
            # `atomic` rolls back for errors of the database only.
            self._connection.rollback()
            raise
        self._commit()

    def savepoint(self) -> Any:
        """Make a savepoint and note where."""
        name = self._savepoint()
        if name:
            self._savepoints[name] = self._number
        return name

    def savepoint_rollback(self, name: str) -> None:
        """Roll back to a savepoint and forget what was published since."""
        self._savepoint_rollback(name)
        last = self._savepoints.get(name, 0)
        connection = self._connection
        connection.run_on_commit = [
            entry
            for entry in connection.run_on_commit
            if not isinstance(entry[1], MessageMarker) or entry[1].number <= last
        ]


def of_alias(alias: str) -> Any:
    """Return the connection of this thread that Django's settings call so. Raises InvalidInput."""
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
    """Say whether an object is a Django database connection."""
    return hasattr(connection, "in_atomic_block") and hasattr(connection, "run_on_commit")


def publish(connection: Any, message: OutboxMessage) -> None:
    """Collect a message for the `atomic` block that is open; without one, write it at once."""
    if not connection.in_atomic_block:
        send(connection, [message])
        return
    hooks = getattr(connection.commit, "__self__", None)
    if not isinstance(hooks, DjangoHooks):
        hooks = DjangoHooks(connection)
    hooks.add(message)
