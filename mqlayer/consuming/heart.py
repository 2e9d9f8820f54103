"""A member's life in Postgres: join, heartbeat, assignments in, partitions given back.

The lease is counted on this machine's own clock from before each heartbeat was sent, and ends a margin before the
database frees the partitions. While Postgres is away the member goes on until then, pauses, and joins again when it is
back, under new epochs.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from mqlayer.consuming.clock import Lease, clock
from mqlayer.consuming.faults import where
from mqlayer.consuming.holdings import Held, State
from mqlayer.errors import GroupRetired, InstanceTaken, MqlayerError, StoreUnavailable
from mqlayer.health import Health, Turns, stuck_after_s
from mqlayer.membership.gates import drained
from mqlayer.membership.groups import Group
from mqlayer.membership.members import (
    Assigned,
    Beat,
    Replaced,
    Session,
    beat,
    join,
    leave,
    next_session,
    release,
    renew,
    start_leaving,
)
from mqlayer.postgres.database import Database
from mqlayer.settings import Settings

log = logging.getLogger(__name__)

LONGEST_BEAT_S: Final = 1.0
"""Hand-overs are seen at heartbeats, so they come more often than a long lease needs."""
SHORTEST_BEAT_S: Final = 0.05
UNRECORDED_S: Final = 0.1
"""How soon a drained partition is reported again whose seal Postgres had not recorded yet."""
TAKEN_S: Final = 0.2
"""How soon an instance of a broadcast group that another process consumes for is asked for again."""
REPLACED: Final = "another process took the member's id, or it was evicted"


class HeartOwner(Protocol):
    """What a heart asks of its member."""

    def follow(self, answer: Beat) -> None:
        """Follow the assignments of a heartbeat's answer."""

    def follow_nodes(self) -> None:
        """Ask which run and address of each node count now, and use no line to another one. Raises StoreUnavailable."""

    def lease_lost(self) -> None:
        """Drop all holdings: the database may have given them away."""

    def replaced(self, reason: str) -> None:
        """End: this process consumes no more, and why."""


class Heart:
    """The heartbeat of one member, in a thread of its own, which alone changes its session once it is started."""

    def __init__(
        self,
        owner: HeartOwner,
        *,
        database: Database,
        group: Group,
        member_id: str,
        settings: Settings,
        name: str,
        again: Callable[[], object] | None = None,
    ) -> None:
        self._again = again
        self._owner, self._database, self._group, self._member_id = owner, database, group, member_id
        self._lease_s, self._margin = settings.lease_s, settings.lease_margin
        self._stuck_after_s, self._turns, self._trouble = stuck_after_s(settings), Turns(), ""
        self._session: Session | None = None
        # Numbers of sessions that are ours: the last one, and those whose joining was not answered.
        self._own: list[int] = []
        self._to_release: queue.SimpleQueue[Assigned] = queue.SimpleQueue()
        # Appended by settlers, taken out by the heart.
        self._drained: list[Held] = []
        self._nudged = threading.Event()
        self._leaving = self._left_to_the_lease = False
        # For which session it was said that it leaves.
        self._leaving_said: Session | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-heart", daemon=True)
        self.lease = Lease()

    def start(self) -> None:
        """Join the group and follow its first assignments, then beat.

        Raises StoreUnavailable, SchemaMismatch, GroupRetired, and InstanceTaken where the process that consumes for
        the same instance of a broadcast group neither is leaving nor lets its lease run out.
        """
        until = clock() + self._lease_s + 1.0
        while not self._joined(until):
            self._ended.wait(TAKEN_S)
        self._thread.start()

    def health(self) -> Health:
        """Say whether it turns, and whether the lease holds."""
        if not self._thread.is_alive():
            return Health(stuck=("the heart ended",))
        waits = () if self.lease.holds() else (f"the lease ran out: {self._trouble or 'no heartbeat came through'}",)
        return Health(self._turns.stuck("the heart", self._stuck_after_s), waits)

    def nudge(self) -> None:
        """Let it beat soon: something changed."""
        self._nudged.set()

    def give_back(self, assigned: Assigned) -> None:
        """Release a partition in Postgres, soon."""
        self._to_release.put(assigned)
        self.nudge()

    def say_drained(self, held: Held) -> None:
        """Tell Postgres that everything before a holding's command record is settled, until it takes that."""
        if held not in self._drained:
            self._drained.append(held)
            self.nudge()

    def renew(self, assigned: Assigned) -> None:
        """Ask for a new epoch for a partition whose present one the node refuses. For `follow` only."""
        session = self._session
        if session is not None:
            renew(self._database, session, assigned)
            self.nudge()

    def start_leaving(self) -> None:
        """Say that the partitions are to be given away, now or with a heartbeat; it beats on while that is done."""
        self._leaving = True
        self._say_leaving()

    def stop(self, timeout_s: float) -> None:
        """End, and leave: what was not given back by then is given to others at once."""
        self._ended.set()
        self.nudge()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._quietly(leave)

    def _run(self) -> None:
        every = min(self._lease_s / 3, LONGEST_BEAT_S)
        while not self._ended.is_set():
            self._nudged.wait((UNRECORDED_S if self._drained else every) * random.uniform(0.8, 1.0))
            self._nudged.clear()
            self._turns.note()
            if not self._ended.is_set() and not self._try_beat():
                self._ended.wait(min(every, 0.5))

    def _try_beat(self) -> bool:
        """Beat once; say whether that went well. Whatever went wrong is said, and tried again."""
        began = clock()
        try:
            if self._session is not None:
                if self.lease.holds():
                    # Else others, whose leases ran out with ours, would be noted as gone before we are back.
                    self._give_back(self._session)
                    self._report_drained(self._session)
                self._beat(self._session)
                self._left_to_the_lease = False
                if self._leaving and self._leaving_said != self._session:
                    self._say_leaving()
        except StoreUnavailable as error:
            self._trouble = str(error)
            facts = {"reason": str(error), "paused": not self.lease.holds()}
            log.warning("heartbeat_failed", extra=facts | self._facts())
            return False
        except MqlayerError as error:
            self._trouble = str(error)
            log.error("heartbeat_failed", extra={"reason": str(error)} | self._facts())
            return False
        except Exception as error:  # noqa: BLE001 - a thread that died would leave a member that never comes back
            self._trouble = where(error)
            log.error("heartbeat_failed", extra={"reason": where(error)} | self._facts())
            return False
        self._trouble = ""
        # Nudges may come faster than Postgres is to be asked.
        self._ended.wait(max(0.0, min(SHORTEST_BEAT_S, self._lease_s / 20) - (clock() - began)))
        return True

    def _joined(self, until: float) -> bool:
        """Join for the first time; False where that is worth another try, up to a time of this process's clock."""
        try:
            return self._join_or_begin_anew() or self._join_or_begin_anew()
        except InstanceTaken as error:
            if clock() >= until and error.state != "leaving":
                raise
            log.warning("instance_taken", extra={"by": error.member, "state": error.state} | self._facts())
            return False

    def _join_or_begin_anew(self) -> bool:
        """Join; where the position of an instance was dropped, bring it back instead, and return False: join then.

        Raises Replaced, and GroupRetired for a group that nobody brings back.
        """
        try:
            self._join()
        except GroupRetired:
            if self._again is None:
                raise
            self._again()
            return False
        return True

    def _join(self) -> None:
        """Join, or join again after sessions of our own. Raises Replaced where the newest is none of them."""
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
        self._beat(self._session)

    def _beat(self, session: Session) -> None:
        began = clock()
        answer = beat(self._database, session, lease_s=self._lease_s, own=self._own)
        if answer.known:
            self._extend(began)
            self._owner.follow(answer)
            # An old primary that lives on behind an open line tells nobody that it was replaced.
            self._owner.follow_nodes()
            return
        self.lease.until = 0.0
        self._owner.lease_lost()
        if answer.replaced:
            self._end()
        elif not self._leaving:
            log.warning("member_lease_ran_out", extra=self._facts())
            try:
                if not self._join_or_begin_anew():
                    self.nudge()
            except Replaced:
                self._end()
            except GroupRetired as error:
                self._end(str(error))

    def _end(self, reason: str = REPLACED) -> None:
        self._session = None
        log.error("member_replaced", extra={"reason": reason} | self._facts())
        self._owner.replaced(reason)

    def _extend(self, began: float) -> None:
        self.lease.until = began + self._lease_s * (1 - self._margin)

    def _give_back(self, session: Session) -> None:
        # Together: each transaction looks at the whole group, and has every member look at its assignments.
        given = [self._to_release.get_nowait() for _ in range(self._to_release.qsize())]
        if not given:
            return
        try:
            release(self._database, session, *given)
        except MqlayerError as error:
            # The heartbeat must not wait for this.
            for assigned in given:
                self._to_release.put(assigned)
            log.warning("release_waits", extra={"partitions": len(given), "reason": str(error)})

    def _report_drained(self, session: Session) -> None:
        for held in list(self._drained):
            command = held.command
            wanted = held.state is State.OPEN and command is not None
            try:
                # A heartbeat must not wait for long.
                patience = {"lock_wait_s": self._lease_s / 8}
                if (
                    wanted
                    and command
                    and not drained(self._database, session, held.assigned, command.seal_id, **patience)
                ):
                    # Not recorded yet, or another seal is, or another epoch is in force: that shows at a heartbeat.
                    continue
            except MqlayerError as error:
                log.warning("drained_waits", extra={"partition": held.partition, "reason": str(error)})
                continue
            self._drained.remove(held)
            if wanted:
                log.info("partition_drained", extra=self._facts() | {"partition": str(held.partition)})

    def _say_leaving(self) -> None:
        session = self._session
        # A heartbeat must not wait for long.
        if self._quietly(partial(start_leaving, lock_wait_s=self._lease_s / 8)):
            self._leaving_said = session

    def _quietly(self, say: Callable[[Database, Session], None]) -> bool:
        """Do what is only a courtesy, unless it failed before: the lease does it later where the store is away.

        Return whether it is done.
        """
        # Without a lease: the database may have been away, and others, who are about to be back, would count as gone.
        if self._session is None or self._left_to_the_lease or not self.lease.holds():
            return False
        try:
            say(self._database, self._session)
        except MqlayerError as error:
            self._left_to_the_lease = True
            log.warning("left_to_the_lease", extra={"reason": str(error)} | self._facts())
            return False
        return True

    def _facts(self) -> dict[str, str]:
        return {"member": self._member_id, "topic": self._group.topic, "group": self._group.name}
