"""End the sessions of dead members: others get their partitions and messages."""

from __future__ import annotations

import time

from mqlayer.cli.dead_processes import DeadProcesses, facts_of
from mqlayer.groups.members import MemberSession, end_dead
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Database
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings

log = event_logger(__name__)


class DeadSessions(DeadProcesses):
    """Ends members' sessions."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(
            Database(settings.control_dsn(), application="mqlayer supervisor", max_size=1), settings.lease_s
        )
        self._runtime = Runtime(self._database, settings)
        self._ended: MemberSession | None = None

    def _try(self, one: MemberSession | str, died_at: float) -> None:
        if not isinstance(one, MemberSession):
            return
        if end_dead(self._database, one):
            self._ended = one
            log.info("dead_member_ended", extra=facts_of(one) | {"after_s": round(time.monotonic() - died_at, 3)})
        if self._ended == one:
            # Only a death needs it.
            from mqlayer.redelivery import reclaim_dead

            # Its unsettled messages of a shared group.
            reclaim_dead(self._runtime, one, died_at)
