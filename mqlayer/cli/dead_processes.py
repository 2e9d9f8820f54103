"""End what dead processes named, in a thread: others take over at once, and not after the lease."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Final, Self

from mqlayer.errors import MqlayerError
from mqlayer.groups.members import MemberSession
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Database

log = event_logger(__name__)

RETRY_S: Final = 0.2
LEFT_S: Final = 2.0
"""How long `close` waits for Postgres."""


class DeadProcesses(ABC):
    """Ends given sessions or relays. One that it can't end within a lease has ended by itself."""

    def __init__(self, database: Database, lease_s: float) -> None:
        self._database, self._lease_s = database, lease_s
        self._given: queue.SimpleQueue[tuple[float, Collection[MemberSession | str]] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mqlayer-dead-processes", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._given.put(None)
        self._thread.join(LEFT_S)
        self._closing.set()
        self._thread.join()
        self._database.close()

    def end(self, named: Collection[MemberSession | str]) -> None:
        """End what a process named that is certainly dead, soon."""
        self._given.put((time.monotonic(), named))

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            died_at, named = given
            for one in named:
                self._end(one, died_at)

    def _end(self, one: MemberSession | str, died_at: float) -> None:
        while True:
            try:
                self._try(one, died_at)
            except MqlayerError as error:
                reason = str(error)
            else:
                return
            if time.monotonic() - died_at >= self._lease_s or self._closing.wait(RETRY_S):
                log.warning("dead_process_left_to_its_lease", extra=facts_of(one) | {"reason": reason})
                return

    @abstractmethod
    def _try(self, one: MemberSession | str, died_at: float) -> None:
        """End one; it is tried again where that raises MqlayerError."""


def facts_of(one: MemberSession | str) -> dict[str, object]:
    """Return whom a log line is about."""
    if isinstance(one, MemberSession):
        return {"group_id": one.group_id, "member": one.member_id}
    return {"relay": one}
