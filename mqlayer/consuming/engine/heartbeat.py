"""A member's session in Postgres: join, heartbeat, leave.

The lease counts on this process's clock from before each heartbeat, and ends before Postgres frees the partitions;
see `docs/design/ownership.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.events import MemberEvents
from mqlayer.consuming.engine.partitions import MemberPartitions
from mqlayer.errors import GroupRetired, InstanceTaken, MqlayerError, StoreUnavailable, VersionRefused
from mqlayer.groups.members import (
    GROUP_HEARTBEATS,
    HeardGroup,
    HeartbeatReply,
    MemberReplaced,
    MemberSession,
    join,
    leave,
    next_session,
    send_heartbeat,
    start_leaving,
)
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Database
from mqlayer.postgres.protocol import refuse_unserved
from mqlayer.randomness import RNG
from mqlayer.runtime.service import RETRY_S, Service

log = event_logger(__name__)

LONGEST_HEARTBEAT_S: Final = 1.0
"""Short even for long leases: heartbeats notice hand-overs."""
REREAD_S: Final = 30.0
"""Reads everything at least so often."""
SHORTEST_HEARTBEAT_S: Final = 0.05
UNREPORTED_S: Final = 0.1
"""Delay of repeated reports."""
TAKEN_RETRY_S: Final = 0.2
"""How soon to join again while another process has this instance."""
REPLACED: Final = "another process took the member's id, or it was evicted"


class Heartbeat(Service):
    """One member's heartbeat thread.

    `partitions` follow each reply, then `refresh_nodes`; `replaced` is called with a reason when the member ends,
    `refused` when the schema no longer serves this code.
    """

    def __init__(
        self,
        core: MemberCore,
        partitions: MemberPartitions,
        refresh_nodes: Callable[[str], object],
        replaced: Callable[[str], None],
        rejoin: Callable[[], object] | None = None,
        events: MemberEvents | None = None,
        refused: Callable[[VersionRefused], None] = lambda _: None,
    ) -> None:
        settings = core.runtime.settings
        self._every_s = min(settings.lease_s / 3, LONGEST_HEARTBEAT_S)
        retry_s = min(self._every_s, RETRY_S)
        super().__init__(f"{core.name}-heartbeat", title="the heartbeat", event="heartbeat", retry_s=retry_s)
        self.wake = core.beat
        self._core, self._partitions, self._refresh_nodes = core, partitions, refresh_nodes
        self._replaced, self._rejoin, self._events, self._refused = replaced, rejoin, events, refused
        self._in_force = core.runtime.in_force
        self._database, self._group, self.lease = core.runtime.heartbeats, core.group, core.lease
        self._lease_s, self._margin = settings.lease_s, settings.lease_margin
        self._session: MemberSession | None = None
        self._heard, self._heard_all_at = HeardGroup(), 0.0
        self._sender = core.runtime.sender
        # This process's session numbers: the last one, and those whose join was not answered.
        self._own: list[int] = []
        self._leaving = self._left_to_lease = False
        # The session that was reported as leaving.
        self._leaving_reported: MemberSession | None = None

    def start(self) -> None:
        """Join the group, apply the first assignments, start the thread.

        Raises StoreUnavailable, SchemaMismatch, VersionRefused, GroupRetired, InstanceTaken.
        """
        until = clock() + self._lease_s + 1.0
        while not self._joined(until):
            self._stopping.wait(TAKEN_RETRY_S)
        super().start()

    def start_leaving(self) -> None:
        """Announce leaving; heartbeats continue."""
        self._leaving = True
        self._report_leaving()

    def stop(self, timeout_s: float) -> bool:
        """End and leave the group; say whether the thread ended."""
        ended = super().stop(timeout_s)
        self._best_effort(leave)
        return ended

    def _waits(self) -> tuple[str, ...]:
        if self.lease.holds():
            return ()
        return (f"the lease ran out: {self.last_error or 'no heartbeat came through'}",)

    def _await_work(self) -> None:
        if self.wake.wait(self._wait_s()):
            # For a reason, which no number may show.
            self._heard.wants_all = self._heard.urgent = True
        self.wake.clear()

    def _wait_s(self) -> float:
        # So that a large group costs Postgres no more than this: notifications tell of hand-overs.
        every_s = min(self._lease_s / 3, max(self._every_s, self._heard.members / GROUP_HEARTBEATS))
        most_s = UNREPORTED_S if self._partitions.unreported else every_s
        return self._sender.wait_s(most_s) if self._sender else most_s * RNG.uniform(0.8, 1.0)

    def _pass(self) -> None:
        if self._stopping.is_set():
            return
        began = clock()
        if self._session is not None:
            if self.lease.holds():
                # Otherwise others, whose leases ran out with this one, would be marked gone before they return.
                self._partitions.report(self._session)
            self._heartbeat(self._session)
            self._left_to_lease = False
            if self._leaving and self._leaving_reported != self._session:
                self._report_leaving()
        # Wake-ups may come faster than Postgres should be asked.
        self._stopping.wait(max(0.0, min(SHORTEST_HEARTBEAT_S, self._lease_s / 20) - (clock() - began)))

    def _condition(self) -> object:
        return self.lease.holds()

    def _report(self, error: Exception) -> None:
        facts = {"reason": self.last_error, "failures": self._failures, **self._facts()}
        if isinstance(error, StoreUnavailable):
            log.warning("heartbeat_failed", extra=facts | {"paused": not self.lease.holds()})
        else:
            log.error("heartbeat_failed", extra=facts)

    def _joined(self, until: float) -> bool:
        try:
            return self._join_or_reset() or self._join_or_reset()
        except InstanceTaken as error:
            if clock() >= until and error.state != "leaving":
                raise
            log.warning("instance_taken", extra={"by": error.member, "state": error.state} | self._facts())
            return False

    def _join_or_reset(self) -> bool:
        try:
            self._join()
        except GroupRetired:
            if self._rejoin is None:
                raise
            self._rejoin()
            return False
        return True

    def _join(self) -> None:
        """Raises MemberReplaced where the newest session is another process's."""
        number = next_session(self._database)
        own = None if self._session is None else tuple(self._own)
        self._own.append(number)
        if self._events is not None:
            # Before it begins: of a session that nobody was told of, only the lease ends.
            self._events.joining(MemberSession(self._group.group_id, self._core.member_id, number))
        began = clock()
        self._session = join(
            self._database,
            group_id=self._group.group_id,
            member_id=self._core.member_id,
            lease_s=self._lease_s,
            session=number,
            own=own,
            deployment=self._core.runtime.settings.deployment,
            zone=self._core.runtime.settings.zone,
        )
        self._in_force.note(self._session.acts_on)
        # It has just looked at the group, which each member that joins would do again.
        self._heard = HeardGroup(members=GROUP_HEARTBEATS)
        self._own = [number]
        self._extend(began)
        self._heartbeat(self._session)

    def _heartbeat(self, session: MemberSession) -> None:
        began = clock()
        answer = self._ask(session, began)
        if answer.known:
            self._extend(began)
            self._partitions.follow(session, answer)
            # An old primary that lives on behind an open connection does not report its replacement.
            self._refresh_nodes(answer.nodes)
            try:
                refuse_unserved(answer.served, "control", self._database.address)
            except VersionRefused as error:
                self._refused(error)
            return
        self.lease.until = 0.0
        self._partitions.lease_lost()
        if answer.replaced:
            self._end_session()
        elif not self._leaving:
            log.warning("member_lease_expired", extra=self._facts())
            if self._events is not None:
                self._events.lease_lost()
            try:
                if not self._join_or_reset():
                    self.wake.set()
            except MemberReplaced:
                self._end_session()
            except GroupRetired as error:
                self._end_session(str(error))
            except VersionRefused as error:
                self._refused(error)
                self._end_session(str(error))

    def _ask(self, session: MemberSession, began: float) -> HeartbeatReply:
        if began - self._heard_all_at >= REREAD_S:
            self._heard.wants_all, self._heard_all_at = True, began
        return send_heartbeat(
            self._database,
            session,
            lease_s=self._lease_s,
            own=self._own,
            in_force=self._in_force,
            heard=self._heard,
            sender=self._sender,
        )

    def _end_session(self, reason: str = REPLACED) -> None:
        self._session = None
        log.error("member_replaced", extra={"reason": reason} | self._facts())
        self._replaced(reason)

    def _extend(self, began: float) -> None:
        self.lease.until = began + self._lease_s * (1 - self._margin)

    def _report_leaving(self) -> None:
        session = self._session
        # A heartbeat must not wait for long.
        if self._best_effort(partial(start_leaving, lock_wait_s=self._lease_s / 8)):
            self._leaving_reported = session

    def _best_effort(self, say: Callable[[Database, MemberSession], None]) -> bool:
        # Without a lease the database may have been down: others, about to return, would be marked gone.
        if self._session is None or self._left_to_lease or not self.lease.holds():
            return False
        try:
            say(self._database, self._session)
        except MqlayerError as error:
            self._left_to_lease = True
            log.warning("left_to_lease", extra={"reason": str(error)} | self._facts())
            return False
        return True

    def _facts(self) -> dict[str, str]:
        return {"member": self._core.member_id, "topic": self._group.topic, "group": self._group.name}
