"""Partitions of a shared member: epochs, and records to skip."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

from mqlayer.consuming.ordered.member import MemberStats
from mqlayer.consuming.shared.prefetch import Prefetch
from mqlayer.consuming.shared.store import SharedStore
from mqlayer.domain.message import Identity
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.groups.group import Group
from mqlayer.groups.lineage import drained_popped, seal_marks
from mqlayer.groups.pop_partitions import PopPartition, pop_partitions, renew_pop_epoch
from mqlayer.postgres.database import Database
from mqlayer.redis.shared_scripts import SharedGroupPartition

log = logging.getLogger(__name__)

NO_NODE: Final = NodeId(0)


class SharedPartition:
    """A partition as one member sees it.

    `acquired`: its epoch was last seen in force. `has_unknown`: the node may list messages unknown to this member,
    after a lost reply or another epoch.
    """

    __slots__ = (
        "acquired",
        "dead",
        "due_in_ms",
        "group_partition",
        "has_unknown",
        "info",
        "marks",
        "paused_until",
        "refused",
    )

    def __init__(self, one: PopPartition, group_partition: SharedGroupPartition) -> None:
        self.info, self.group_partition = one, group_partition
        self.acquired, self.has_unknown = False, True
        self.due_in_ms, self.paused_until, self.refused = -1, 0.0, 0
        # Dead or redriven messages that may come again, after a fall-back also at other offsets.
        self.dead: set[Identity] = set()
        # Recorded marks of a parent whose last messages its successors hold too.
        self.marks: Mapping[str, int] = {}

    def is_void(self, identity: Identity) -> bool:
        """Say whether a record is dead, or belongs to the successors."""
        source, lp, seq = identity
        return identity in self.dead or seq > self.marks.get(f"{source}:{lp}", seq)


class SharedPartitions:
    """All readable partitions, for any thread. `repair` arms a node."""

    def __init__(
        self,
        database: Database,
        group: Group,
        store: SharedStore,
        prefetch: Prefetch,
        stats: MemberStats,
        *,
        prefix: str,
        repair: Callable[[NodeId], None],
        wake_heartbeat: Callable[[], None],
    ) -> None:
        self._database, self._group, self._store = database, group, store
        self._prefetch, self._stats, self._prefix = prefetch, stats, prefix
        self._repair, self._wake_heartbeat = repair, wake_heartbeat
        self._readable: dict[PartitionId, SharedPartition] = {}
        self._known: dict[PartitionId, PopPartition] = {}
        self.epoch = 0
        """The highest epoch listed, for all fences."""

    def all(self) -> list[SharedPartition]:
        """Return the readable partitions."""
        return list(self._readable.values())

    def on(self, node_id: NodeId) -> list[SharedPartition]:
        """Return a node's readable partitions."""
        return [partition for partition in self._readable.values() if partition.info.node == node_id]

    def known(self, partition: int) -> PopPartition:
        """Return a partition, with `NO_NODE` once deleted."""
        gone = PopPartition(PartitionId(partition), NO_NODE, None, 1, 0, 0, cut=False, readable=False)
        return self._known.get(PartitionId(partition), gone)

    def forget(self) -> None:
        """Read nothing more."""
        self._readable = {}

    def refresh(self) -> None:
        """Load partitions and epochs. Raises StoreUnavailable."""
        found = pop_partitions(self._database, self._group.group_id)
        self.epoch = max([self.epoch, *(one.epoch for one in found if one.epoch is not None)])
        self._known = {one.partition: one for one in found}
        self._readable = {
            one.partition: self._partition(one, one.epoch) for one in found if one.readable and one.epoch is not None
        }

    def _partition(self, one: PopPartition, epoch: int) -> SharedPartition:
        known = self._readable.get(one.partition)
        if known is not None and known.info == one:
            return known
        partition = SharedPartition(
            one, SharedGroupPartition(self._prefix, one.partition, self._group.group_id, epoch, one.start, one.seek)
        )
        if known is not None:
            partition.refused = known.refused
            if known.group_partition != partition.group_partition:
                self._drop(known.group_partition)
        return partition

    def load_dead(self, partition: SharedPartition, committed: int) -> None:
        """Load records to skip."""
        partition.dead = self._store.dead_from(partition.group_partition.partition, committed)
        partition.marks = seal_marks(self._database, partition.group_partition.partition) if partition.info.cut else {}

    def report_drained(self, partition: PartitionId, epoch: int, seal_id: str) -> None:
        """Record a partition as drained; repeated after refusals."""
        group = self._group
        if partition in self._readable and drained_popped(self._database, group.group_id, partition, epoch, seal_id):
            log.info("partition_drained", extra={"partition": str(partition), "group": group.name})
            self._wake_heartbeat()

    def void(self, group_partition: SharedGroupPartition) -> None:
        """Drop a replaced epoch's messages."""
        self._drop(group_partition)
        partition = self._readable.get(PartitionId(group_partition.partition))
        if partition is not None:
            partition.has_unknown = True
        self._wake_heartbeat()

    def fenced(self, partition: SharedPartition) -> None:
        """Find or request a higher epoch."""
        self._stats.fenced += 1
        group_partition = partition.group_partition
        self._drop(group_partition)
        if partition.refused == group_partition.epoch:
            renew_pop_epoch(self._database, self._group.group_id, group_partition.partition, group_partition.epoch)
        partition.refused = group_partition.epoch
        self._wake_heartbeat()

    def refused(self, partition: SharedPartition) -> None:
        """Repair a partition's node. Raises nothing."""
        self._drop(partition.group_partition)
        self._repair(partition.info.node)
        self._wake_heartbeat()

    def node_lost(self, node_id: NodeId) -> None:
        """Drop a node's messages; arm it. Raises nothing."""
        self._prefetch.drop(lambda batch: batch.claim is None and batch.assignment.node == node_id)
        for partition in self.on(node_id):
            partition.acquired, partition.has_unknown = False, True
        self._repair(node_id)
        self._wake_heartbeat()

    def _drop(self, group_partition: SharedGroupPartition) -> None:
        self._prefetch.drop(lambda batch: batch.group_partition == group_partition)
