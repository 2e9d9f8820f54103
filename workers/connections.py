"""Connections of tasks, opened at first use, because they don't survive a fork."""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import ExitStack
from typing import Any, Final

from celery.signals import worker_process_shutdown

from mqlayer.producing import Producer
from mqlayer.runtime.presence import Presence
from mqlayer.runtime.runtime import Runtime, open_runtime
from mqlayer.settings import Settings

# Per process and schema. A thread may keep one for ten seconds, while it waits for a node's row.
MOST_CONNECTIONS: Final = 10


class ProcessConnections:
    """Settings, pools and producer of one process. Thread-safe."""

    def __init__(self) -> None:
        self._settings = Settings()
        self._lock = threading.Lock()
        self._cleanup = ExitStack()
        self._runtime: Runtime | None = None
        self._producer: Producer | None = None
        self._presence: Presence | None = None

    def runtime(self) -> Runtime:
        """Return the pools and settings."""
        with self._lock:
            if self._runtime is None:
                here = open_runtime(self._settings, name="mqlayer worker", actor="worker", max_size=MOST_CONNECTIONS)
                self._runtime = self._cleanup.enter_context(here)
            return self._runtime

    def presence(self) -> Presence:
        """Return this process's row among those that live."""
        here = self.runtime()
        with self._lock:
            if self._presence is None:
                self._presence = Presence(here.control, "worker", "jobs", here.in_force)
            return self._presence

    def producer(self) -> Producer:
        """Return the one producer, which keeps keys in order."""
        with self._lock:
            if self._producer is None:
                self._producer = Producer(self._settings, name="worker")
            return self._producer

    def close(self) -> None:
        """Send queued messages, then close everything."""
        with self._lock:
            try:
                if self._producer is not None:
                    self._producer.close()
                if self._presence is not None:
                    self._presence.end()
            finally:
                # Also when the producer reports a loss.
                self._cleanup.close()


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


def runtime() -> Runtime:
    """Return the pools and settings of this process."""
    return _stores().runtime()


def presence() -> Presence:
    """Return this process's row among those that live."""
    return _stores().presence()


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
