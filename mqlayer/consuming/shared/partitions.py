"""Partitions of a shared member: epochs, and records to skip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from mqlayer.consuming.engine.breaker_session import BreakerSession
from mqlayer.consuming.engine.class_limits import ClassLimits
from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.events import MemberEvents
from mqlayer.consuming.engine.nodes import MemberNodes, R, S
from mqlayer.consuming.engine.partitions import MemberPartitions
from mqlayer.consuming.shared.failure_queues import FailureQueues
from mqlayer.consuming.shared.fetched_batch import FetchedBatch
from mqlayer.consuming.shared.prefetch import Prefetch
from mqlayer.consuming.shared.store import ClaimedMessage, SharedStore
from mqlayer.domain.key_classes import key_class_rule
from mqlayer.domain.message import Identity, Record
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.errors import MqlayerError
from mqlayer.groups.lineage import drained_popped, seal_marks
from mqlayer.groups.members import HeartbeatReply, MemberSession
from mqlayer.groups.pop_partitions import PopPartition, pop_partitions, renew_pop_epoch
from mqlayer.logs import event_logger
from mqlayer.redis.shared_scripts import SharedGroupPartition

log = event_logger(__name__)

NO_NODE: Final = NodeId(0)


class SharedPartition:
    """A partition as one member sees it.

    `acquired`: its epoch was last seen in force. `has_unknown`: the node may list messages unknown to this member,
    after a lost reply or another epoch.
    """

    __slots__ = (
        "acquired",
        "dead",
        "deferred",
        "deferred_after",
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
        # How many messages wait on the node for their class's turn, and the class that the node gave last.
        self.deferred, self.deferred_after = 0, b""
        # Dead or redriven messages that may come again, after a fall-back also at other offsets.
        self.dead: set[Identity] = set()
        # Recorded marks of a parent whose last messages its successors hold too.
        self.marks: Mapping[str, int] = {}

    def confirm(self, due_in_ms: int, deferred: int) -> None:
        """Note a confirmed epoch."""
        self.acquired, self.due_in_ms, self.refused, self.deferred = True, due_in_ms, 0, deferred

    def took_deferred(self, after: bytes, left: int) -> None:
        """Note the class given last, and how many are left."""
        self.deferred_after, self.deferred = after, left

    def messages_due(self) -> None:
        """Note that given back messages are due."""
        self.due_in_ms = 0

    def drain(self, until: float) -> None:
        """Read nothing until then: everything is settled."""
        self.due_in_ms, self.paused_until = -1, until

    def acquire_again(self) -> None:
        """Have its epoch set again on the node."""
        self.acquired = False

    def lose(self, until: float = 0.0) -> None:
        """Note a void epoch; pause until then."""
        self.acquired, self.has_unknown = False, True
        self.paused_until = max(self.paused_until, until)

    def note_unknown(self) -> None:
        """Note that the node may list others."""
        self.has_unknown = True

    def unknown_released(self) -> None:
        """Note that those were given back."""
        self.has_unknown = False

    def load(self, dead: set[Identity], marks: Mapping[str, int]) -> None:
        """Take over which records to skip."""
        self.dead, self.marks = dead, marks

    def refuse_again(self) -> bool:
        """Note a refused epoch; say whether again."""
        again, self.refused = self.refused == self.group_partition.epoch, self.group_partition.epoch
        return again

    def is_void(self, identity: Identity) -> bool:
        """Whether a record is dead, or belongs to the successors."""
        source, lp, seq = identity
        return identity in self.dead or seq > self.marks.get(f"{source}:{lp}", seq)


class SharedPartitions(MemberPartitions):
    """All readable partitions, for any thread."""

    def __init__(
        self,
        core: MemberCore,
        store: SharedStore,
        prefetch: Prefetch,
        events: MemberEvents,
        nodes: MemberNodes[R, S],
        queues: FailureQueues,
        breaker: BreakerSession,
    ) -> None:
        self._core, self._database, self._group = core, core.runtime.control, core.group
        self._store, self._prefetch, self._events, self._queues = store, prefetch, events, queues
        self._open_node, self._repair, self._wake_readers = nodes.open, nodes.repair, nodes.wake_readers
        self._breaker = breaker
        self._readable: dict[PartitionId, SharedPartition] = {}
        self._known: dict[PartitionId, PopPartition] = {}
        self._listing = True
        self.epoch = 0
        """The highest epoch listed, for all fences."""

    # -- the heartbeat -------------------------------------------------------------------------------------------------

    def follow(self, session: MemberSession, reply: HeartbeatReply) -> None:
        """Follow settings and partitions."""
        del session
        settings = self._core.settings
        parking_version = settings.parking_version
        settings.follow(reply)
        if self._breaker.follow(reply.breaker):
            self._wake_readers()
        if reply.parking_version != parking_version:
            self._queues.poll_soon()
        if not self._listing:
            return
        try:
            self._refresh()
            partitions = self.all()
            settings.rate_limiter.configure(partitions[0].info.rate if partitions else None, len(partitions))
            limits = ClassLimits(settings.rules.class_concurrency, reply.class_rate, max(1, len(partitions)))
            self._prefetch.classes.follow(key_class_rule(settings.rules.key_class), limits)
            for node_id in {partition.info.node for partition in partitions}:
                self._open_node(node_id)
        except MqlayerError as error:
            log.warning("partitions_not_listed", extra={"reason": str(error)})

    def report(self, session: MemberSession) -> None:
        """Report for the circuit breaker."""
        self._breaker.send(session)

    @property
    def unreported(self) -> bool:
        """Whether to repeat a report soon."""
        return self._breaker.unsent

    def lease_lost(self) -> None:
        """Do nothing: the nodes decide who has messages."""

    def stop_listing(self) -> None:
        """Follow no further partitions."""
        self._listing = False

    def close(self) -> None:
        """Read nothing more."""
        self.stop_listing()
        self._readable = {}

    def served(self) -> dict[int, tuple[int, str]]:
        """Return partition -> (epoch, state)."""
        return {
            int(one.group_partition.partition): (one.group_partition.epoch, "open" if one.acquired else "new")
            for one in self.all()
        }

    def missing(self) -> tuple[str, ...]:
        """Return why partitions are not read."""
        missing = sorted(one.group_partition.partition for one in self.all() if not one.acquired)
        return (f"partitions {', '.join(map(str, missing))} are not read",) if missing else ()

    # -- readers, settlers and the failure writer ----------------------------------------------------------------------

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

    def _refresh(self) -> None:
        deployment = self._core.runtime.settings.deployment
        found = pop_partitions(self._database, self._group.group_id, deployment=deployment)
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
            one,
            SharedGroupPartition(
                self._core.runtime.prefix, one.partition, self._group.group_id, epoch, one.start, one.seek
            ),
        )
        if known is not None:
            partition.refused = known.refused
            if known.group_partition != partition.group_partition:
                self._drop(known.group_partition)
        return partition

    def batch(self, partition: SharedPartition, records: Sequence[Record]) -> FetchedBatch:
        """Return a batch of read records."""
        return FetchedBatch(partition.info, partition.group_partition, self.epoch, records, clock())

    def claimed(self, claim: ClaimedMessage) -> FetchedBatch:
        """Return a redriven message's batch."""
        batch = FetchedBatch(self.known(claim.partition), None, self.epoch, [claim.record], clock())
        batch.of_claim(claim)
        return batch

    def load_dead(self, partition: SharedPartition, committed: int) -> None:
        """Load records to skip."""
        number = partition.group_partition.partition
        dead = self._store.dead_from(number, committed)
        partition.load(dead, seal_marks(self._database, number) if partition.info.cut else {})

    def report_drained(self, partition: PartitionId, epoch: int, seal_id: str) -> None:
        """Record a partition as drained; repeated after refusals."""
        group = self._group
        if partition in self._readable and drained_popped(self._database, group.group_id, partition, epoch, seal_id):
            log.info("partition_drained", extra={"partition": str(partition), "group": group.name})
            self._core.beat.set()

    def void(self, group_partition: SharedGroupPartition) -> None:
        """Drop a replaced epoch's messages."""
        self._drop(group_partition)
        partition = self._readable.get(PartitionId(group_partition.partition))
        if partition is not None:
            partition.note_unknown()
        self._core.beat.set()

    def fenced(self, partition: SharedPartition) -> None:
        """Find or request a higher epoch."""
        self._events.fenced()
        group_partition = partition.group_partition
        self._drop(group_partition)
        if partition.refuse_again():
            renew_pop_epoch(self._database, self._group.group_id, group_partition.partition, group_partition.epoch)
        self._core.beat.set()

    def refused(self, partition: SharedPartition) -> None:
        """Repair a partition's node. Raises nothing."""
        self._drop(partition.group_partition)
        self._repair(partition.info.node)
        self._core.beat.set()

    def node_lost(self, node_id: NodeId) -> None:
        """Drop a node's messages; arm it. Raises nothing."""
        self._prefetch.drop(lambda batch: batch.claim is None and batch.assignment.node == node_id)
        for partition in self.on(node_id):
            partition.lose()
        self._repair(node_id)
        self._core.beat.set()

    def _drop(self, group_partition: SharedGroupPartition) -> None:
        self._prefetch.drop(lambda batch: batch.group_partition == group_partition)
        if self._core.spans is not None:
            self._core.spans.forget(group_partition.partition)
