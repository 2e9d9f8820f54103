"""Connections of tasks, opened at first use, because they don't survive a fork."""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any, Final

from celery.signals import worker_process_shutdown

from mqlayer.postgres.database import Database
from mqlayer.producing import Producer
from mqlayer.settings import Settings

# Per process and schema. A thread may keep one for ten seconds, while it waits for a node's row.
MOST_CONNECTIONS: Final = 10


class ProcessConnections:
    """Settings, pools and producer of one process. Thread-safe."""

    def __init__(self) -> None:
        self.settings: Final = Settings()
        self._lock = threading.Lock()
        self._databases: dict[tuple[str, str], Database] = {}
        self._producer: Producer | None = None

    def database(self, role: str, dsn: str) -> Database:
        """Return a role's pool.

        Roles share none: a holder of control locks may need the outbox, and must not queue behind its locks' waiters.
        """
        with self._lock:
            if (role, dsn) not in self._databases:
                self._databases[role, dsn] = Database(dsn, application="mqlayer worker", max_size=MOST_CONNECTIONS)
            return self._databases[role, dsn]

    def producer(self) -> Producer:
        """Return the one producer, which keeps keys in order."""
        with self._lock:
            if self._producer is None:
                self._producer = Producer(self.settings, name="worker")
            return self._producer

    def close(self) -> None:
        """Send queued messages, then close everything."""
        with self._lock:
            try:
                if self._producer is not None:
                    self._producer.close()
            finally:
                # Also when the producer reports a loss.
                for database in self._databases.values():
                    database.close()


class _ProcessState:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stores: ProcessConnections | None = None
        # Keeps the parent's alive: dropping them in a child would end the parent's sessions.
        self.inherited: list[ProcessConnections | None] = []

    def forked(self) -> None:
        # A thread that held the lock at the fork does not exist in the child.
        self.lock = threading.Lock()
        self.inherited.append(self.stores)
        self.stores = None


_process: Final = _ProcessState()


def settings() -> Settings:
    """Return the settings of this process."""
    return _stores().settings


def control() -> Database:
    """Return the pool on the control database."""
    stores = _stores()
    return stores.database("control", stores.settings.control_dsn())


def application() -> Database:
    """Return the pool on the application database."""
    stores = _stores()
    return stores.database("application", stores.settings.application_dsn())


def producer() -> Producer:
    """Return the producer. Raises StoreUnavailable without Postgres."""
    return _stores().producer()


def close() -> None:
    """Close all; the next use opens new ones by new settings."""
    with _process.lock:
        stores, _process.stores = _process.stores, None
    if stores is not None:
        stores.close()


def _stores() -> ProcessConnections:
    with _process.lock:
        if _process.stores is None:
            _process.stores = ProcessConnections()
        return _process.stores


@worker_process_shutdown.connect
def _shut_down(**_: Any) -> None:
    # Pool processes skip atexit.
    close()


os.register_at_fork(after_in_child=_process.forked)
atexit.register(close)
