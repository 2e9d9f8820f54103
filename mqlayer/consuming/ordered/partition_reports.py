"""Released and drained partitions, for Postgres."""

from __future__ import annotations

import queue
import threading

from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition, OwnershipState
from mqlayer.errors import MqlayerError
from mqlayer.groups.lineage import drained
from mqlayer.groups.members import Assignment, MemberSession, release
from mqlayer.logs import event_logger

log = event_logger(__name__)


class PartitionReports:
    """Any thread adds, the heartbeat's thread sends."""

    def __init__(self, core: MemberCore) -> None:
        self._database, self._beat = core.runtime.control, core.beat
        # A heartbeat must not wait for long.
        self._lock_wait_s = core.runtime.settings.lease_s / 8
        self._facts = {"member": core.member_id, "topic": core.group.topic, "group": core.group.name}
        self._to_release: queue.SimpleQueue[Assignment] = queue.SimpleQueue()
        self._drained: list[OwnedPartition] = []
        self._adding = threading.Lock()

    def release(self, assignment: Assignment) -> None:
        """Give a partition back soon."""
        self._to_release.put(assignment)
        self._beat.set()

    def drained(self, owned: OwnedPartition) -> None:
        """Report a drained partition until Postgres records it."""
        with self._adding:
            if owned in self._drained:
                return
            self._drained.append(owned)
        self._beat.set()

    @property
    def unsent(self) -> bool:
        """Whether to repeat a report soon."""
        return bool(self._drained)

    def send(self, session: MemberSession) -> None:
        """Send the added reports."""
        self._release(session)
        self._report_drained(session)

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
            command = owned.command if owned.state is OwnershipState.OPEN else None
            try:
                if command is not None and not drained(
                    self._database, session, owned.assignment, command.seal_id, lock_wait_s=self._lock_wait_s
                ):
                    # The seal is not recorded, or another seal or epoch is in force: a heartbeat shows which.
                    continue
            except MqlayerError as error:
                log.warning("drained_delayed", extra={"partition": owned.partition, "reason": str(error)})
                continue
            self._drained.remove(owned)
            if command is not None:
                log.info("partition_drained", extra=self._facts | {"partition": str(owned.partition)})
