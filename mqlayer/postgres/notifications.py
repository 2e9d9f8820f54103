"""Listen to Postgres notifications in a thread. Best effort: also poll."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import Final

import psycopg
from psycopg import sql

from mqlayer.errors import MqlayerError
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Database, connect_directly

log = event_logger(__name__)

ROUTE: Final = "mqlayer_route"
"""A new route version; payload: the topic."""
GROUP: Final = "mqlayer_group"
"""Changed assignments; payload: see `groups/wakeups.py`."""
PURPOSE: Final = "hearing notifications (LISTEN)"
RETRY_S: Final = 1.0
POLL_S: Final = 0.5


class NotificationListener:
    """Calls `heard(payload)` per notification, and `heard("")` when listening begins."""

    def __init__(
        self, database: Database, channel: str, heard: Callable[[str], None], *, application: str = "mqlayer routes"
    ) -> None:
        self._database, self._channel, self._heard, self._application = database, channel, heard, application
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        # `close` writes to this pipe to end the wait at once.
        self._ends = (-1, -1)

    def start(self) -> None:
        """Start the thread. Raises ConfigurationRefused if only a pooler is known."""
        self._database.check_direct(PURPOSE)
        self._ends = os.pipe()
        self._thread = threading.Thread(target=self._run, name=f"mqlayer-hears-{self._channel}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._stopping.set()
        if self._thread is None:
            return
        os.write(self._ends[1], b".")
        self._thread.join(timeout=5)
        # A thread that still connects will read the pipe.
        if not self._thread.is_alive():
            self._thread = None
            for end in self._ends:
                os.close(end)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
            except (MqlayerError, psycopg.Error) as error:
                log.debug("notifications_lost", extra={"channel": self._channel, "reason": type(error).__name__})
                self._stopping.wait(RETRY_S)

    def _listen(self) -> None:
        with connect_directly(self._database.dsn, purpose=PURPOSE, application=self._application) as connection:
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
            self._heard("")
            changes = select.poll()
            for source in (connection.fileno(), self._ends[0]):
                changes.register(source, select.POLLIN)
            while not self._stopping.is_set():
                for notification in connection.notifies(timeout=0):
                    self._heard(notification.payload)
                changes.poll(POLL_S * 1000)
