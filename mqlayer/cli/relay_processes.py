"""Several relays of one command. A dead one's LP sets go to the others at once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final

from mqlayer.cli.dead_processes import DeadProcesses, facts_of
from mqlayer.cli.supervisor import Supervisor
from mqlayer.groups.members import MemberSession
from mqlayer.health import health_endpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Database
from mqlayer.relay.lp_leases import end_dead_relay
from mqlayer.settings import Settings

log = event_logger(__name__)

STOP_LIMIT_S: Final = 30.0


class DeadRelays(DeadProcesses):
    """Ends relays; `freed` is called once LP sets are free."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(
            Database(settings.application_dsn(), application="mqlayer supervisor", max_size=1), settings.lease_s
        )
        self.freed: Callable[[], None] = lambda: None

    def _try(self, one: MemberSession | str, died_at: float) -> None:
        if isinstance(one, MemberSession):
            return
        lp_sets = end_dead_relay(self._database, one)
        if lp_sets:
            self.freed()
            facts = {"lp_sets": lp_sets, "after_s": round(time.monotonic() - died_at, 3)}
            log.info("dead_relay_ended", extra=facts_of(one) | facts)


def supervise_relays(settings: Settings, count: int, environment: Mapping[str, str]) -> bool:
    """Run relays until SIGTERM or SIGINT; False where none could start or one was killed."""
    dead = DeadRelays(settings)
    supervisor = Supervisor(
        [sys.executable, "-m", "mqlayer", "relay"],
        count=count,
        environment={**os.environ, **environment},
        stop_limit_s=STOP_LIMIT_S,
        ended=dead.end,
    )
    dead.freed = supervisor.wake
    with dead, health_endpoint(settings, supervisor.health):
        return supervisor.run()
