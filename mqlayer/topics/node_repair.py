"""Repair the partitions of a node that restarted or lost data: `docs/design/arming-nodes.md`.

Runs under the lock on the node's row, before its run is armed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import retire_command
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.lost_messages import LostMessages
from mqlayer.topics.node_state import DesiredPartition, NodeState
from mqlayer.topics.partition_creation import PartitionCreation
from mqlayer.topics.partition_refill import PartitionRefill

log = event_logger(__name__)

TOMBSTONES_PER_WRITE: Final = 500


@dataclass(slots=True)
class RepairReport:
    """Repaired partitions, and lost messages per partition."""

    recreated: list[int] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    sealed: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """Return an audit row's facts."""
        lost = {str(partition): count for partition, count in self.lost.items()}
        done = {"partitions_remade": self.recreated, "opened": self.opened, "sealed": self.sealed, "lost": lost}
        return done | ({"counted": self.counted} if self.counted else {})


class NodeRepair:
    """Brings one node to the state in Postgres. `empty`: see NodeState."""

    def __init__(
        self,
        runtime: Runtime,
        connection: Connection,
        node_connection: NodeConnection,
        *,
        accept_loss: bool,
        accept_loss_of: frozenset[int] = frozenset(),
        empty: bool = False,
    ) -> None:
        self._connection, self._node_connection, self._prefix = connection, node_connection, runtime.prefix
        self._accept_loss = accept_loss
        self.state = NodeState(connection, node_connection, runtime.prefix, empty=empty)
        lost = LostMessages(connection, node_connection, runtime.prefix, accept=accept_loss, accept_of=accept_loss_of)
        self._creation = PartitionCreation(connection, node_connection, runtime.prefix)
        self._refill = PartitionRefill(runtime, connection, node_connection, self._creation, lost)
        self._raised: Sequence[tuple[int, int, int]] = ()
        self.report = RepairReport(lost=lost.counts)

    @property
    def needed(self) -> bool:
        """Whether a partition differs from Postgres. Raises ConfigurationRefused for a wrong key prefix."""
        return (
            self.state.is_empty
            or self._accept_loss
            or any(not self.state.is_right(desired) for desired in self.state.desired)
        )

    def lower(self) -> None:
        """Lower recorded positions above lost offsets: Redis assigns these again.

        Commit before refilling: after a crash the partitions are longer.
        """
        facts = {"partitions": list(self.state.offsets), "offsets": list(self.state.offsets.values())}
        self._connection.execute(query("group_starts_lower"), facts)
        self._connection.execute(query("archive_progress_lower"), facts)
        self._connection.execute(query("dead_log_lost"), facts)

    def repair(self, raised: Sequence[tuple[int, int, int]]) -> None:
        """Repair under new epochs (group, partition, epoch). Raises StoreUnavailable, Conflict."""
        self._raised = raised
        self.lower()
        for desired in self.state.desired:
            if not self.state.is_right(desired):
                self._repair_one(desired)
            if self._accept_loss and not desired.seal_id:
                self._refill.unblock(desired)
        self._delete_retired()

    def _delete_retired(self) -> None:
        rows = self._connection.execute(
            query("node_tombstones"), {"node_id": self._node_connection.node.node_id}
        ).fetchall()
        for at in range(0, len(rows), TOMBSTONES_PER_WRITE):
            some = rows[at : at + TOMBSTONES_PER_WRITE]
            commands = [
                retire_command(self._node_connection, self._prefix, partition, groups, archived=archived)
                for partition, groups, archived in some
            ]
            for reply in self._node_connection.call(commands):
                raise_for_reply(reply, self._node_connection.node.address)

    def _repair_one(self, desired: DesiredPartition) -> None:
        if self.state[desired].flaw:
            self._repair_flaw(desired)
            if self.state.is_right(desired):
                return
        state = self.state[desired].state
        if state == "deleted" and desired.seal_id and self._is_retired(desired):
            return
        if state is None:
            self._creation.make(desired, self._raised)
            self.report.recreated.append(desired.partition)
        if state in (None, "importing") and self._creation.load(desired):
            self.report.opened.append(desired.partition)
        if desired.seal_id:
            self._refill.reseal(desired, self.state[desired])
            self.report.sealed.append(desired.partition)
        elif state in (None, "importing"):
            self._creation.open(desired)
        failpoint("repair.after_one")

    def _repair_flaw(self, desired: DesiredPartition) -> None:
        flaw = self.state[desired].flaw
        if flaw == "command":
            self._refill.put_command(desired)
        else:
            self._creation.count(desired, flaw)
            self.report.counted.append(desired.partition)
        self.state.observe_again(desired)

    def _is_retired(self, desired: DesiredPartition) -> bool:
        facts = {"partition_id": desired.partition}
        if not self._connection.execute(query("partition_retired_before"), facts).rowcount:
            return False
        log.warning("retirement_lost", extra={"partition": desired.partition})
        return True
