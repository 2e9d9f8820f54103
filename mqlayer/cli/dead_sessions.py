"""End the sessions of dead processes, in a thread: others get their partitions at once, and not after the lease."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection
from typing import Final, Self

from mqlayer.errors import MqlayerError
from mqlayer.groups.members import MemberSession, end_dead
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Database
from mqlayer.settings import Settings

log = event_logger(__name__)

RETRY_S: Final = 0.2
LEFT_S: Final = 2.0
"""How long `close` waits for Postgres."""


class DeadSessions:
    """Ends sessions that it is given. What it can't end within a lease has ended by itself."""

    def __init__(self, settings: Settings) -> None:
        self._lease_s = settings.lease_s
        self._database = Database(settings.control_dsn(), application="mqlayer supervisor", max_size=1)
        self._given: queue.SimpleQueue[tuple[float, Collection[MemberSession]] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mqlayer-dead-sessions", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._given.put(None)
        self._thread.join(LEFT_S)
        self._closing.set()
        self._thread.join()
        self._database.close()

    def end(self, sessions: Collection[MemberSession]) -> None:
        """End sessions of a process that is certainly dead, soon."""
        self._given.put((time.monotonic(), sessions))

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            died_at, sessions = given
            for session in sessions:
                self._end(session, died_at)

    def _end(self, session: MemberSession, died_at: float) -> None:
        facts: dict[str, object] = {"group_id": session.group_id, "member": session.member_id}
        while True:
            try:
                ended = end_dead(self._database, session)
            except MqlayerError as error:
                reason = str(error)
            else:
                if ended:
                    log.info("dead_member_ended", extra=facts | {"after_s": round(time.monotonic() - died_at, 3)})
                return
            if time.monotonic() - died_at >= self._lease_s or self._closing.wait(RETRY_S):
                log.warning("dead_member_left_to_its_lease", extra=facts | {"reason": reason})
                return
