"""Follow what Postgres assigns to a member."""

from __future__ import annotations

from mqlayer.consuming.engine.breaker_session import BreakerSession
from mqlayer.consuming.engine.class_limits import ClassLimits
from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.nodes import MemberNodes
from mqlayer.consuming.engine.partitions import MemberPartitions
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition, OwnershipState
from mqlayer.consuming.ordered.ownership import Ownership
from mqlayer.consuming.ordered.parking_worker import ParkingWorker
from mqlayer.consuming.ordered.partition_reports import PartitionReports
from mqlayer.consuming.ordered.reader import Reader
from mqlayer.consuming.ordered.settler import Settler
from mqlayer.domain.key_classes import key_class_rule
from mqlayer.domain.routing import PartitionId
from mqlayer.errors import MqlayerError
from mqlayer.groups.lineage import seal_marks
from mqlayer.groups.members import Assignment, HeartbeatReply, MemberSession, renew
from mqlayer.logs import event_logger
from mqlayer.redis.partition_scripts import LockHolder

log = event_logger(__name__)


class Assignments(MemberPartitions):
    """Owns assigned partitions, releases others."""

    def __init__(
        self,
        core: MemberCore,
        ownership: Ownership,
        dispatcher: Dispatcher,
        nodes: MemberNodes[Reader, Settler],
        reports: PartitionReports,
        parking_worker: ParkingWorker,
        breaker: BreakerSession,
    ) -> None:
        self._core, self._ownership, self._dispatcher, self._nodes = core, ownership, dispatcher, nodes
        self._reports, self._parking_worker, self._breaker = reports, parking_worker, breaker
        self._allocation = -1
        # Deadline by which the release of a dropped partition waits for its handlers.
        self._release_by: dict[PartitionId, float] = {}
        # Partitions of the last heartbeat; `missing` compares them with those served.
        self._assigned: frozenset[PartitionId] = frozenset()

    def follow(self, session: MemberSession, reply: HeartbeatReply) -> None:
        """Follow a reply, unless outdated."""
        if reply.allocation < self._allocation:
            return
        self._allocation = reply.allocation
        settings = self._core.settings
        parking_version = settings.parking_version
        if settings.follow(reply):
            # Other rules may end waits in place.
            self._dispatcher.retry_now()
        if self._breaker.follow(reply.breaker):
            self._dispatcher.retry_now()
            self._nodes.wake_readers()
            self._parking_worker.wake.set()
        if reply.parking_version != parking_version:
            self._parking_worker.wake.set()
        wanted = {assignment.partition: assignment for assignment in reply.assignments}
        self._assigned = frozenset(partition for partition, assignment in wanted.items() if not assignment.release)
        settings.rate_limiter.configure(reply.rate, len(self._assigned))
        limits = ClassLimits(settings.rules.class_concurrency, reply.class_rate, max(1, len(self._assigned)))
        self._dispatcher.classes.follow(key_class_rule(settings.rules.key_class), limits)
        self._drop_others(wanted)
        for assignment in reply.assignments:
            try:
                self._follow(session, assignment)
            except MqlayerError as error:
                log.warning("assignment_delayed", extra={"partition": assignment.partition, "reason": str(error)})

    def lease_lost(self) -> None:
        """Drop all partitions."""
        self._allocation = -1
        self._assigned = frozenset()
        self._release_by.clear()
        self._ownership.drop_all()

    def report(self, session: MemberSession) -> None:
        """Report given back and drained partitions."""
        self._reports.send(session)
        self._breaker.send(session)

    @property
    def unreported(self) -> bool:
        """Whether to repeat a report soon."""
        return self._reports.unsent or self._breaker.unsent

    def close(self) -> None:
        """Take nothing more."""
        self._ownership.close()

    def drain_all(self, until: float) -> None:
        """Start nothing more; running handlers have until `until`."""
        for owned in self._ownership.all():
            self._drain(owned, until)

    def served(self) -> dict[int, tuple[int, str]]:
        """Return partition -> (epoch, state)."""
        return self._ownership.served()

    def missing(self) -> tuple[str, ...]:
        """Return why partitions are not consumed."""
        missing = sorted(self._assigned - self._ownership.opened())
        return (f"partitions {', '.join(map(str, missing))} are assigned, and not pulled",) if missing else ()

    def _drop_others(self, wanted: dict[PartitionId, Assignment]) -> None:
        for owned in self._ownership.all():
            assignment = wanted.get(owned.partition)
            if assignment is None or assignment.epoch != owned.epoch:
                self._ownership.drop(owned)
        self._release_by = {
            partition: until
            for partition, until in self._release_by.items()
            if partition in wanted and wanted[partition].release and self._ownership.get(partition) is None
        }

    def _follow(self, session: MemberSession, assignment: Assignment) -> None:
        owned = self._ownership.get(assignment.partition)
        if assignment.release:
            if owned is None:
                self._release(assignment)
            elif owned.state in (OwnershipState.NEW, OwnershipState.OPEN):
                self._drain(owned, clock() + self._core.options.drain_timeout_s)
        elif owned is not None:
            self._follow_replay(owned, assignment)
        elif self._ownership.closed:
            return
        elif self._ownership.is_refused(assignment):
            renew(self._core.runtime.control, session, assignment)
            self._core.beat.set()
        else:
            self._own(assignment)

    def _follow_replay(self, owned: OwnedPartition, assignment: Assignment) -> None:
        owned.follow_replay(waits=assignment.waits_for_replay)
        if owned.waits_for_replay and not assignment.waits_for_replay:
            self._parking_worker.wake.set()

    def _release(self, assignment: Assignment) -> None:
        until = self._release_by.setdefault(assignment.partition, clock() + self._core.options.drain_timeout_s)
        if clock() >= until or not self._dispatcher.runs_on(assignment.partition):
            del self._release_by[assignment.partition]
            self._reports.release(assignment)

    def _own(self, assignment: Assignment) -> None:
        runtime, group = self._core.runtime, self._core.group
        node_io = self._nodes.open(assignment.node)
        cut = seal_marks(runtime.control, assignment.partition) if assignment.cut else {}
        lock_holder = LockHolder(
            runtime.prefix, assignment.partition, group.group_id, self._core.member_id, assignment.epoch
        )
        # On a best-effort topic a failing message waits alone.
        ordered = group.ordered and group.strategy == "strict"
        if self._ownership.add(OwnedPartition(assignment, lock_holder, ordered=ordered, cut=cut)):
            node_io.reader.wake.set()

    def _drain(self, owned: OwnedPartition, until: float) -> None:
        self._dispatcher.drain(owned, until)
        self._nodes.wake_settlers()
