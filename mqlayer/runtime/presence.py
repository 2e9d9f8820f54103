"""A process's row in `mqlayer.process`: its kind, release and protocol versions (docs/design/upgrades.md).

Members have rows of their own; relays have one here besides their lease.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Literal

from mqlayer.domain.protocol import PRODUCER_TOPICS, ServedProtocols
from mqlayer.errors import MqlayerError, VersionRefused
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Database
from mqlayer.postgres.protocol import InForce, code_facts, refuse_unserved
from mqlayer.postgres.queries import query
from mqlayer.runtime.service import Service

log = event_logger(__name__)

ProcessKind = Literal["relay", "worker", "producer", "receiver"]
LEASE_S: Final = 30.0
"""A process silent for longer does not hold a finalization up."""
MOST_TOPICS: Final = 1_000
"""So many topics have room in a row."""
ANY_TOPIC: Final = 0
"""In place of the topics without room."""


class Presence:
    """Says that this process lives, and learns which versions the schema serves. Thread-safe. `name`: for people."""

    def __init__(self, control: Database, kind: ProcessKind, name: str, in_force: InForce | None = None) -> None:
        self.in_force = in_force or InForce()
        self._control = control
        self._lock, self._running = threading.Lock(), 0
        self._id = f"{kind}-{os.getpid()}-{secrets.token_hex(8)}"
        self._facts = code_facts() | {"process_id": self._id, "kind": kind, "name": name}
        self._facts |= {"host": socket.gethostname(), "pid": os.getpid()}
        # Only added to: of two beats that cross, the later one has all topics of the other one.
        self._topics: set[int] = set()
        self._said: set[int] = set()
        # Whether its row is there, which says what it acts on.
        self._lives = False

    def beat(self, lease_s: float = LEASE_S) -> None:
        """Extend the lease. Raises VersionRefused for code that is too old, StoreUnavailable."""
        began, acted_on = self._lives, self.in_force.version
        self._beat(lease_s)
        if began and self.in_force.version > acted_on:
            # Contract steps wait for it.
            self._beat(lease_s)

    def _beat(self, lease_s: float) -> None:
        with self._lock:
            facts = json.dumps(self._facts | {"acts_on": self.in_force.version, "topics": _shown(self._topics)})
        with self._control.connection() as connection:
            row = connection.execute(query("process_beat"), {"facts": facts, "lease_s": lease_s}).fetchone()
        if row is not None:
            served = ServedProtocols(*row)
            self._lives = True
            self.in_force.note(served.in_force)
            refuse_unserved(served, "control", self._control.address)

    def publish_to(self, topic_id: int) -> None:
        """Say a topic before its first message. Raises as `beat`.

        While earlier code may live, the next beat is early enough: nothing relies on it yet.
        """
        with self._lock:
            if topic_id in self._said:
                return
            self._topics.add(topic_id)
            # With the lock, so that the first beat that acts on the version has it.
            if not self.in_force.has(PRODUCER_TOPICS):
                self._said.add(topic_id)
                return
        self.beat()
        with self._lock:
            self._said.add(topic_id)

    @contextmanager
    def working(self, at_most_s: float) -> Iterator[None]:
        """Live through a piece of work. Raises VersionRefused or StoreUnavailable before it begins."""
        with self._lock:
            self._running += 1
        try:
            self.beat(at_most_s)
            yield
        finally:
            with self._lock:
                self._running -= 1
                idle = not self._running
            if idle:
                with suppress(MqlayerError):
                    self.beat()

    def end(self) -> None:
        """Remove the row, if Postgres answers."""
        try:
            with self._control.connection() as connection:
                connection.execute(query("process_end"), {"process_id": self._id})
        except MqlayerError as error:
            log.info("process_row_left", extra={"reason": str(error)})


def _shown(topics: set[int]) -> list[int]:
    shown = sorted(topics)
    return shown if len(shown) <= MOST_TOPICS else [ANY_TOPIC, *shown[:MOST_TOPICS]]


class PresenceService(Service):
    """Beats in the background. `refused` is called once, with the error, when the code is too old; that ends it."""

    def __init__(self, presence: Presence, refused: Callable[[VersionRefused], None]) -> None:
        super().__init__("mqlayer-presence", title="the report of this process", event="presence", retry_s=LEASE_S / 6)
        self._presence, self._tell = presence, refused
        self.refused: VersionRefused | None = None

    def start(self) -> None:
        """Beat once, then start the thread. Raises VersionRefused, StoreUnavailable."""
        self._presence.beat()
        super().start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread, and remove the row; also of one that did not start."""
        if not self.started:
            self._presence.end()
        return super().stop(timeout_s)

    def _wait_s(self) -> float:
        return LEASE_S / 3

    def _pass(self) -> None:
        if self._stopping.is_set():
            return
        try:
            self._presence.beat()
        except VersionRefused as error:
            self.refused = error
            log.error("code_too_old", extra={"reason": str(error)})
            self._tell(error)
            # It begins nothing more, so a finalization need not wait for its last call.
            self.end()

    def _close(self) -> None:
        self._presence.end()
