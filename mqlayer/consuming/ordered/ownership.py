"""The partitions that a member owns."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.events import OrderedEvents
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition, OwnershipState
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.groups.members import Assignment


class Ownership:
    """A member's owned partitions, and the epochs under which a node refused it. Thread-safe.

    `repair` arms a node and raises nothing.
    """

    def __init__(
        self, core: MemberCore, dispatcher: Dispatcher, events: OrderedEvents, repair: Callable[[NodeId], None]
    ) -> None:
        self._core, self._dispatcher, self._events, self._repair = core, dispatcher, events, repair
        self._by_partition: dict[PartitionId, OwnedPartition] = {}
        self._changed = threading.Condition()
        self._closed = False
        # Epochs that a node refused; these partitions need higher ones.
        self._refused: dict[PartitionId, int] = {}

    def all(self) -> list[OwnedPartition]:
        """Return every owned partition."""
        with self._changed:
            return list(self._by_partition.values())

    def on(self, node_id: NodeId) -> list[OwnedPartition]:
        """Return a node's owned partitions."""
        with self._changed:
            return [owned for owned in self._by_partition.values() if owned.assignment.node == node_id]

    def get(self, partition: PartitionId) -> OwnedPartition | None:
        """Return the owned partition, or None."""
        with self._changed:
            return self._by_partition.get(partition)

    def shares(self, owned: OwnedPartition) -> tuple[int, int]:
        """Return a partition's bounds in flight: records, bytes."""
        count, options = max(1, len(self._by_partition)), self._core.options
        messages, most = (
            options.prefetch_count // count,
            self._core.settings.rate_limiter.max_in_flight(options.concurrency),
        )
        if most is not None:
            # Spilled key queues count as one each, and must not keep other keys from being read.
            messages = min(messages, max(1, most // count) + owned.room.spilled)
        return max(1, messages), max(1, options.prefetch_bytes // count)

    @property
    def closed(self) -> bool:
        """Whether no further partition is taken."""
        return self._closed

    # -- taking and leaving --------------------------------------------------------------------------------------------

    def add(self, owned: OwnedPartition) -> bool:
        """Own a partition, unless closed; say whether it is owned."""
        with self._changed:
            if not self._closed:
                self._by_partition[owned.partition] = owned
            return not self._closed

    def is_refused(self, assignment: Assignment) -> bool:
        """Whether a node refused the assignment's epoch."""
        return self._refused.get(assignment.partition) == assignment.epoch

    def drop(self, owned: OwnedPartition) -> None:
        """Forget a partition; running results are void."""
        self._dispatcher.drop(owned)
        if self._core.spans is not None:
            self._core.spans.forget(owned.partition)
        with self._changed:
            if self._by_partition.get(owned.partition) is owned:
                del self._by_partition[owned.partition]
            self._changed.notify_all()

    def drop_all(self) -> None:
        """Forget all partitions."""
        for owned in self.all():
            self.drop(owned)

    def close(self) -> None:
        """Take no further partitions."""
        with self._changed:
            self._closed = True

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait; say whether nothing is owned."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._by_partition, timeout=max(0.0, timeout_s))

    # -- losses --------------------------------------------------------------------------------------------------------

    def fenced(self, owned: OwnedPartition, by: str) -> None:
        """Drop a partition whose epoch was replaced."""
        self._events.lost(owned, by)
        self.lock_lost(owned)

    def lock_lost(self, owned: OwnedPartition) -> None:
        """Drop a partition; it needs another epoch.

        Under the old one, a late parking transaction could commit unseen.
        """
        self._refuse(owned)
        self._core.beat.set()

    def partition_refused(self, owned: OwnedPartition) -> None:
        """Drop a partition that its node lost, then arm the node. Raises nothing."""
        self._refuse(owned)
        self._repair(owned.assignment.node)

    def node_lost(self, node_id: NodeId) -> None:
        """Drop all partitions of a restarted node, then arm it. Raises nothing."""
        for owned in self.on(node_id):
            self.drop(owned)
        self._repair(node_id)

    def _refuse(self, owned: OwnedPartition) -> None:
        self._refused[owned.partition] = owned.epoch
        self.drop(owned)

    def served(self) -> dict[int, tuple[int, str]]:
        """Return partition -> (epoch, state)."""
        return {owned.partition: (owned.epoch, owned.state.name.lower()) for owned in self.all()}

    def opened(self) -> set[PartitionId]:
        """Return the partitions whose locks were taken."""
        return {owned.partition for owned in self.all() if owned.state is not OwnershipState.NEW}
