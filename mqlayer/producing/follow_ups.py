"""Follow-ups of a change of the in-flight store: rules ask, the owner acts."""

from __future__ import annotations

from dataclasses import dataclass

from mqlayer.domain.message import Identity
from mqlayer.producing.outcomes import Appended, Recovered
from mqlayer.producing.send_queues import Listener, NodeQueue, PartitionQueue, PendingSend, TopicQueues


@dataclass(frozen=True, slots=True)
class Reroute:
    """Get a newer route, then release the topic's queues."""

    topic: TopicQueues


@dataclass(frozen=True, slots=True)
class RefreshLimits:
    """Read a topic's limits, unless fresh."""

    topic: TopicQueues


@dataclass(frozen=True, slots=True)
class RenewSource:
    """Register a new incarnation."""


@dataclass(frozen=True, slots=True)
class StoredLookup:
    """Find a send's first `early` messages; the others begin at `offset`."""

    pending: PendingSend
    early: int
    appended: Appended
    offset: int
    partition_queues: tuple[PartitionQueue, ...]

    def outcome(self, found: dict[Identity, tuple[int, int]]) -> Recovered:
        """Return all places, as far as found."""
        positions: list[tuple[int, int | None]] = [
            found.get(identity, (self.appended.partition, None)) for identity in self.wanted()
        ]
        positions += [(self.appended.partition, self.offset + i) for i in range(self.pending.count - self.early)]
        return Recovered(self.appended.source, self.appended.replicas, tuple(positions))

    def wanted(self) -> list[Identity]:
        """Return the early identities."""
        first, lp = self.pending.first, self.pending.queue.lp
        return [Identity(self.appended.source, lp, first + i) for i in range(self.early)]


ProducerJob = Reroute | RefreshLimits | RenewSource | StoredLookup


class FollowUps:
    """Listeners to notify, nodes to wake, jobs to schedule."""

    __slots__ = ("jobs", "listeners", "nodes")

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.nodes: dict[NodeQueue, None] = {}
        self.jobs: list[ProducerJob] = []

    def wake(self, node: NodeQueue) -> None:
        """Have a node's sender look for work."""
        self.nodes[node] = None

    def take_listeners(self) -> list[Listener]:
        """Return the listeners, each once."""
        listeners, self.listeners = self.listeners, []
        return listeners
