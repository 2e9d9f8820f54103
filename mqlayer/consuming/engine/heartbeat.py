"""A member's session in Postgres: join, heartbeat, assignments, releases.

The lease counts on this process's clock from before each heartbeat, and ends a margin before Postgres frees the
partitions; see `docs/design/ownership.md`.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from mqlayer.consuming.engine.clock import Lease, clock
from mqlayer.consuming.engine.error_text import where
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition, OwnershipState
from mqlayer.errors import GroupRetired, InstanceTaken, MqlayerError, StoreUnavailable
from mqlayer.groups.group import Group
from mqlayer.groups.lineage import drained
from mqlayer.groups.members import (
    Assignment,
    HeartbeatReply,
    MemberReplaced,
    MemberSession,
    join,
    leave,
    next_session,
    release,
    renew,
    send_heartbeat,
    start_leaving,
)
from mqlayer.health import Health, Liveness, stuck_after_s
from mqlayer.postgres.database import Database
from mqlayer.settings import Settings

log = logging.getLogger(__name__)

LONGEST_HEARTBEAT_S: Final = 1.0
"""Short even for long leases: heartbeats notice hand-overs."""
SHORTEST_HEARTBEAT_S: Final = 0.05
UNRECORDED_S: Final = 0.1
"""Delay of repeated drained reports."""
TAKEN_RETRY_S: Final = 0.2
"""How soon to join again while another process has this instance."""
REPLACED: Final = "another process took the member's id, or it was evicted"


class HeartbeatOwner(Protocol):
    """The member, as its heartbeat uses it."""

    def apply_assignments(self, answer: HeartbeatReply) -> None:
        """Follow a heartbeat's reply."""

    def refresh_nodes(self) -> None:
        """Follow changed nodes. Raises StoreUnavailable."""

    def lease_lost(self) -> None:
        """Drop all partitions."""

    def replaced(self, reason: str) -> None:
        """End, with the reason."""


class Heartbeat:
    """One member's heartbeat thread."""

    def __init__(
        self,
        owner: HeartbeatOwner,
        *,
        database: Database,
        group: Group,
        member_id: str,
        settings: Settings,
        name: str,
        rejoin: Callable[[], object] | None = None,
    ) -> None:
        self._rejoin = rejoin
        self._owner, self._database, self._group, self._member_id = owner, database, group, member_id
        self._lease_s, self._margin = settings.lease_s, settings.lease_margin
        self._stuck_after_s, self._liveness, self._last_error = stuck_after_s(settings), Liveness(), ""
        self._session: MemberSession | None = None
        # This process's session numbers: the last one, and those whose join was not answered.
        self._own: list[int] = []
        self._to_release: queue.SimpleQueue[Assignment] = queue.SimpleQueue()
        # Settlers append, the heartbeat removes.
        self._drained: list[OwnedPartition] = []
        self._woken = threading.Event()
        self._leaving = self._left_to_lease = False
        # The session that was reported as leaving.
        self._leaving_reported: MemberSession | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-heartbeat", daemon=True)
        self.lease = Lease()

    def start(self) -> None:
        """Join the group, apply the first assignments, start the thread.

        Raises StoreUnavailable, SchemaMismatch, GroupRetired, InstanceTaken.
        """
        until = clock() + self._lease_s + 1.0
        while not self._joined(until):
            self._ended.wait(TAKEN_RETRY_S)
        self._thread.start()

    def health(self) -> Health:
        """Report thread and lease."""
        if not self._thread.is_alive():
            return Health(stuck=("the heartbeat ended",))
        waits = () if self.lease.holds() else (f"the lease ran out: {self._last_error or 'no heartbeat came through'}",)
        return Health(self._liveness.stuck("the heartbeat", self._stuck_after_s), waits)

    def wake(self) -> None:
        """Send a heartbeat soon."""
        self._woken.set()

    def release(self, assignment: Assignment) -> None:
        """Release a partition soon."""
        self._to_release.put(assignment)
        self.wake()

    def report_drained(self, owned: OwnedPartition) -> None:
        """Report a drained partition until Postgres records it."""
        if owned not in self._drained:
            self._drained.append(owned)
            self.wake()

    def renew(self, assignment: Assignment) -> None:
        """Request a new epoch; only from `apply_assignments`."""
        session = self._session
        if session is not None:
            renew(self._database, session, assignment)
            self.wake()

    def start_leaving(self) -> None:
        """Announce leaving; heartbeats continue."""
        self._leaving = True
        self._report_leaving()

    def stop(self, timeout_s: float) -> None:
        """End and leave the group."""
        self._ended.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._best_effort(leave)

    def _run(self) -> None:
        every = min(self._lease_s / 3, LONGEST_HEARTBEAT_S)
        while not self._ended.is_set():
            self._woken.wait((UNRECORDED_S if self._drained else every) * random.uniform(0.8, 1.0))
            self._woken.clear()
            self._liveness.note_turn()
            if not self._ended.is_set() and not self._try_heartbeat():
                self._ended.wait(min(every, 0.5))

    def _try_heartbeat(self) -> bool:
        began = clock()
        try:
            if self._session is not None:
                if self.lease.holds():
                    # Otherwise others, whose leases ran out with this one, would be marked gone before they return.
                    self._release(self._session)
                    self._report_drained(self._session)
                self._heartbeat(self._session)
                self._left_to_lease = False
                if self._leaving and self._leaving_reported != self._session:
                    self._report_leaving()
        except StoreUnavailable as error:
            self._last_error = str(error)
            facts = {"reason": str(error), "paused": not self.lease.holds()}
            log.warning("heartbeat_failed", extra=facts | self._facts())
            return False
        except MqlayerError as error:
            self._last_error = str(error)
            log.error("heartbeat_failed", extra={"reason": str(error)} | self._facts())
            return False
        except Exception as error:  # noqa: BLE001 - a thread that died would leave a member that never comes back
            self._last_error = where(error)
            log.error("heartbeat_failed", extra={"reason": where(error)} | self._facts())
            return False
        self._last_error = ""
        # Wake-ups may come faster than Postgres should be asked.
        self._ended.wait(max(0.0, min(SHORTEST_HEARTBEAT_S, self._lease_s / 20) - (clock() - began)))
        return True

    def _joined(self, until: float) -> bool:
        try:
            return self._join_or_reset() or self._join_or_reset()
        except InstanceTaken as error:
            if clock() >= until and error.state != "leaving":
                raise
            log.warning("instance_taken", extra={"by": error.member, "state": error.state} | self._facts())
            return False

    def _join_or_reset(self) -> bool:
        """Join; or revive a retired instance and return False."""
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
        began = clock()
        self._session = join(
            self._database,
            group_id=self._group.group_id,
            member_id=self._member_id,
            lease_s=self._lease_s,
            session=number,
            own=own,
        )
        self._own = [number]
        self._extend(began)
        self._heartbeat(self._session)

    def _heartbeat(self, session: MemberSession) -> None:
        began = clock()
        answer = send_heartbeat(self._database, session, lease_s=self._lease_s, own=self._own)
        if answer.known:
            self._extend(began)
            self._owner.apply_assignments(answer)
            # An old primary that lives on behind an open connection does not report its replacement.
            self._owner.refresh_nodes()
            return
        self.lease.until = 0.0
        self._owner.lease_lost()
        if answer.replaced:
            self._end()
        elif not self._leaving:
            log.warning("member_lease_expired", extra=self._facts())
            try:
                if not self._join_or_reset():
                    self.wake()
            except MemberReplaced:
                self._end()
            except GroupRetired as error:
                self._end(str(error))

    def _end(self, reason: str = REPLACED) -> None:
        self._session = None
        log.error("member_replaced", extra={"reason": reason} | self._facts())
        self._owner.replaced(reason)

    def _extend(self, began: float) -> None:
        self.lease.until = began + self._lease_s * (1 - self._margin)

    def _release(self, session: MemberSession) -> None:
        # In one transaction: each checks the whole group and wakes every member.
        given = [self._to_release.get_nowait() for _ in range(self._to_release.qsize())]
        if not given:
            return
        try:
            release(self._database, session, *given)
        except MqlayerError as error:
            # The heartbeat must not wait for this.
            for assignment in given:
                self._to_release.put(assignment)
            log.warning("release_delayed", extra={"partitions": len(given), "reason": str(error)})

    def _report_drained(self, session: MemberSession) -> None:
        for owned in list(self._drained):
            command = owned.command
            wanted = owned.state is OwnershipState.OPEN and command is not None
            try:
                # A heartbeat must not wait for long.
                timeouts = {"lock_wait_s": self._lease_s / 8}
                if (
                    wanted
                    and command
                    and not drained(self._database, session, owned.assignment, command.seal_id, **timeouts)
                ):
                    # The seal is not recorded, or another seal or epoch is in force: a heartbeat shows which.
                    continue
            except MqlayerError as error:
                log.warning("drained_delayed", extra={"partition": owned.partition, "reason": str(error)})
                continue
            self._drained.remove(owned)
            if wanted:
                log.info("partition_drained", extra=self._facts() | {"partition": str(owned.partition)})

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
        return {"member": self._member_id, "topic": self._group.topic, "group": self._group.name}
