"""What a process has open for its tasks: opened at first use there, for neither pools nor producers survive a fork."""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any, Final

from celery.signals import worker_process_shutdown

from mqlayer.postgres.database import Database
from mqlayer.producing import Producer
from mqlayer.settings import Settings

MOST_CONNECTIONS: Final = 10
"""Of one process to one schema, opened on demand: for each thread that is at it. Who arms a node may wait ten seconds
for the node's row; others must not wait for a connection as long."""


class ProcessConnections:
    """Settings, pools and producer of one process. Safe to use from many threads."""

    def __init__(self) -> None:
        self.settings: Final = Settings()
        self._lock = threading.Lock()
        self._databases: dict[tuple[str, str], Database] = {}
        self._producer: Producer | None = None

    def database(self, role: str, dsn: str) -> Database:
        """Return the pool on a database in a role.

        One for each role, also where both are in one database: who holds locks of the control schema may need a
        connection to the outbox, and must not wait for those who wait for these locks.
        """
        with self._lock:
            if (role, dsn) not in self._databases:
                self._databases[role, dsn] = Database(dsn, application="mqlayer worker", max_size=MOST_CONNECTIONS)
            return self._databases[role, dsn]

    def producer(self) -> Producer:
        """Return the producer; one per process, so that what a process sends of a key keeps its order."""
        with self._lock:
            if self._producer is None:
                self._producer = Producer(self.settings, name="worker")
            return self._producer

    def close(self) -> None:
        """Send what is queued, then close everything."""
        with self._lock:
            try:
                if self._producer is not None:
                    self._producer.close()
            finally:
                # Also where the producer has a loss to tell.
                for database in self._databases.values():
                    database.close()


class _ProcessState:
    """The stores of this process, once something asked for them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stores: ProcessConnections | None = None
        # A parent's stay: to drop them in a child would end the parent's sessions.
        self.inherited: list[ProcessConnections | None] = []

    def forked(self) -> None:
        """Begin anew in a child: a thread that held the lock at the fork does not exist there."""
        self.lock = threading.Lock()
        self.inherited.append(self.stores)
        self.stores = None


_process: Final = _ProcessState()


def settings() -> Settings:
    """Return the settings of this process."""
    return _stores().settings


def control() -> Database:
    """Return this process's pool on the control database."""
    stores = _stores()
    return stores.database("control", stores.settings.control_dsn())


def application() -> Database:
    """Return this process's pool on the application database."""
    stores = _stores()
    return stores.database("application", stores.settings.application_dsn())


def producer() -> Producer:
    """Return this process's producer. Raises StoreUnavailable where Postgres can't be reached at its start."""
    return _stores().producer()


def close() -> None:
    """Close what this process has open; what is asked for next is opened anew, by the settings as they are then."""
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
    """A pool's process leaves without Python's own end."""
    close()


os.register_at_fork(after_in_child=_process.forked)
atexit.register(close)
