"""Hearing what Postgres notifies of, in a thread with a connection of its own.

Best effort: a notification says only that a look pays now, and everybody who listens also looks by himself at times.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

import psycopg
from psycopg import sql

from mqlayer.errors import MqlayerError
from mqlayer.postgres.database import connect

log = logging.getLogger(__name__)

ROUTE: Final = "mqlayer_route"
"""A route version was put in force; the payload is the topic."""
GROUP: Final = "mqlayer_group"
"""Assignments of a group changed; the payload is its id."""
AGAIN_S: Final = 1.0


class Notices:
    """Calls `heard(payload)` for each notification on a channel; with "" when it begins to listen: some were missed."""

    def __init__(self, dsn: str, channel: str, heard: Callable[[str], None], *, application: str) -> None:
        self._dsn, self._channel, self._heard, self._application = dsn, channel, heard, application
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"mqlayer-hears-{channel}", daemon=True)

    def start(self) -> None:
        """Begin to listen; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
            except (MqlayerError, psycopg.Error) as error:
                log.debug("notices_lost", extra={"channel": self._channel, "reason": type(error).__name__})
                self._stopping.wait(AGAIN_S)

    def _listen(self) -> None:
        with connect(self._dsn, application=self._application) as connection:
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
            self._heard("")
            while not self._stopping.is_set():
                for notification in connection.notifies(timeout=0.5):
                    self._heard(notification.payload)
