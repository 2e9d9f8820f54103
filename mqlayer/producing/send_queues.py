"""Unsettled messages per LP, partition and node. No I/O, no clock.

A queue's unsettled seqs, `acked` + 1 to `next_seq` - 1, are first `in_flight`, then `waiting`. A blocked queue sends
nothing until its last answer:

repeat   refused or overtaken: send again
route    its partition does not serve it: get a newer route
lost     the node lost acknowledged messages
once     a message with a dedup id is in flight
"""

from __future__ import annotations

from collections import deque
from typing import Final, Literal, cast

import msgspec

from mqlayer.domain.durability import NODE, Durability
from mqlayer.domain.message import NO_KEY, mark_reordered
from mqlayer.domain.routing import LP_COUNT, NodeId, Route
from mqlayer.errors import PublishError
from mqlayer.producing.outcomes import SendOutcome
from mqlayer.redis.wire import bulk, bulk_number

NO_KEY_BULK: Final = bulk(NO_KEY)
CHUNKS_PER_MESSAGE: Final = 5
"""Facts, key, body head, body, line end."""

BlockReason = Literal["repeat", "route", "lost", "once"]

SenderKey = tuple[NodeId, Durability]


class Listener:
    """Waits for `remaining` messages; `notify` runs once, after the last.

    `remaining` and `failed` need the lock. `notify` runs without it: it may run application callbacks.
    """

    __slots__ = ("remaining",)

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining

    def notify(self) -> None:
        """Report the outcome."""
        raise NotImplementedError

    def failed(self, pending: PendingSend) -> None:
        """Note a failure."""


class PendingSend(msgspec.Struct, eq=False, gc=False):
    """Consecutive messages of one LP from one call, settled together.

    `chunks`: encoded messages, of `size` bytes. Refusals are final after `deadline` (monotonic). Queuing sets `queue`
    and `first`, the first seq; settling sets `outcome`, and `offset` if one append stored it. With a `token` (dedup id)
    it is one message. `eager`: fail once the partition is full.

    The garbage collector skips it: break its cycles.
    """

    chunks: tuple[bytes, ...]
    count: int
    size: int
    deadline: float
    listener: Listener | None
    outcome: SendOutcome | None = None
    offset: int = 0
    first: int = 0
    queue: LpQueue = cast("LpQueue", None)
    token: bytes = b""
    eager: bool = False

    @property
    def last(self) -> int:
        """The last seq."""
        return self.first + self.count - 1

    def mark_reordered(self) -> int:
        """Mark keyed messages as reordered; return the growth in bytes."""
        chunks, before = list(self.chunks), self.size
        for at in range(0, len(chunks), CHUNKS_PER_MESSAGE):
            if chunks[at + 1] != NO_KEY_BULK:
                facts = chunks[at]
                chunks[at] = bulk(mark_reordered(facts[facts.index(b"\n") + 1 : -2]))
                self.size += len(chunks[at]) - len(facts)
        self.chunks = tuple(chunks)
        return self.size - before


class LpQueue:
    """One LP of a topic. `source` is None until the producer has a new one.

    Seqs up to `uncertain_to` were sent without an answer; partitions in `uncertain_at` may have them.
    """

    __slots__ = (
        "acked",
        "blocked_by",
        "in_flight",
        "lost_after",
        "lp",
        "lp_bulk",
        "next_seq",
        "partition_queue",
        "queued",
        "rerouted_seq",
        "reroutes",
        "source",
        "topic",
        "uncertain_at",
        "uncertain_to",
        "waiting",
    )  # fmt: skip

    def __init__(self, topic: TopicQueues, lp: int, source: int | None) -> None:
        self.topic, self.lp, self.lp_bulk = topic, lp, bulk_number(lp)
        self.partition_queue = topic.table[lp]
        self.waiting: deque[PendingSend] = deque()
        self.in_flight: deque[PendingSend] = deque()
        self.queued = False
        self.blocked_by: BlockReason | None = None
        self.reroutes = self.rerouted_seq = 0
        self.restart(source)

    def restart(self, source: int | None) -> None:
        """Number from 1 under another source; nothing may be unsettled."""
        self.source = source
        self.next_seq = 1
        self.acked = self.uncertain_to = self.lost_after = 0
        self.uncertain_at: tuple[PartitionQueue, ...] = ()

    def take_unsent(self) -> list[PendingSend]:
        """Remove messages certainly not stored, except with dedup ids, which only this LP knows."""
        index = next((i for i, pending in enumerate(self.waiting) if pending.first > self.uncertain_to), None)
        if index is None:
            return []
        gone = self.truncate(index)
        for pending in gone:
            if pending.token:
                pending.first = self.next_seq
                self.next_seq += pending.count
                self.waiting.append(pending)
        return [pending for pending in gone if not pending.token]

    def requeue(self) -> None:
        """Move messages in flight back to the front."""
        self.waiting.extendleft(reversed(self.in_flight))
        self.in_flight.clear()

    def renumber(self, source: int | None) -> None:
        """Give a duplicate's seq to the next message, or restart at 1. Nothing may be in flight."""
        if source != self.source:
            self.restart(source)
            number = 1
        else:
            number = self.acked + 1
        for pending in self.waiting:
            pending.first = number
            number += pending.count
        self.next_seq = number

    def note_uncertain(self) -> None:
        """Messages in flight may be stored: never reuse their seqs."""
        if not self.in_flight:
            return
        self.uncertain_to = max(self.uncertain_to, self.in_flight[-1].last)
        if self.partition_queue not in self.uncertain_at:
            self.uncertain_at = (*self.uncertain_at, self.partition_queue)

    def first_expired(self, now: float, *, full: bool) -> int | None:
        """Return the index of the first expired message certainly not stored. `full`: eager ones are expired."""
        for index, pending in enumerate(self.waiting):
            if (pending.deadline <= now or (full and pending.eager)) and pending.first > self.uncertain_to:
                return index
        return None

    def is_unsent(self, pending: PendingSend) -> bool:
        """Whether a message waits and is certainly not stored."""
        return pending.first > self.uncertain_to and pending in self.waiting

    def remove(self, pending: PendingSend) -> None:
        """Remove an unsent message and close the gap."""
        index = self.waiting.index(pending)
        behind = list(self.waiting)[index + 1 :]
        del self.waiting[index]
        # None behind it was sent, so their seqs may change.
        for later in behind:
            later.first -= pending.count
        self.next_seq -= pending.count

    def truncate(self, index: int) -> list[PendingSend]:
        """Remove waiting messages from an index on, and free their seqs."""
        gone = [self.waiting.pop() for _ in range(len(self.waiting) - index)]
        gone.reverse()
        self.next_seq = gone[0].first
        return gone


class PartitionQueue:
    """A partition and its ready queues. After a `refusal`, or what its class lacked, it pauses until `retry_at`."""

    __slots__ = ("backlog_limit", "lack", "listed", "node", "partition", "ready", "refusal", "refusals", "retry_at")

    def __init__(self, partition: int, node: NodeQueue, backlog_limit: int) -> None:
        self.partition, self.node, self.backlog_limit = partition, node, backlog_limit
        self.ready: deque[LpQueue] = deque()
        self.listed = False
        self.retry_at = 0.0
        self.refusals = 0
        self.refusal: PublishError | None = None
        self.lack = ""

    def is_paused(self, now: float) -> bool:
        """Whether it or its node failed, and no retry is due."""
        return (self.refusal is not None and now < self.retry_at) or self.node.is_unreachable(now)


class NodeQueue:
    """A node's partitions with ready queues. After `failures` of its connection it pauses until `retry_at`.

    `runs`: the node's name, its former armed run and the present one, or "". Topics that wait for more than the node's
    answer have queues and connections of their own: a wait holds up later requests.
    """

    __slots__ = ("durability", "failures", "last_error", "node_id", "partition_queues", "retry_at", "runs")

    def __init__(self, node_id: NodeId, name: str, armed_run: str, durability: Durability = NODE) -> None:
        self.node_id, self.runs, self.durability = node_id, (name, "", armed_run), durability
        self.partition_queues: deque[PartitionQueue] = deque()
        self.failures = 0
        self.last_error = ""
        self.retry_at = 0.0

    @property
    def key(self) -> SenderKey:
        """Name of its sender."""
        return self.node_id, self.durability

    def is_unreachable(self, now: float) -> bool:
        """Whether the connection failed and no retry is due."""
        return self.failures > 0 and now < self.retry_at

    def due_in_s(self, now: float) -> float | None:
        """Seconds until its work is due; None without work."""
        if not self.partition_queues:
            return None
        return max(0.0, self.retry_at - now, min(queue.retry_at for queue in self.partition_queues) - now)


class TopicQueues:
    """A topic's newest known route and used queues."""

    __slots__ = (
        "best_effort", "body_limit", "name", "queues", "read_at", "rerouting", "route", "table", "waiting_for_route",
    )  # fmt: skip

    def __init__(self, route: Route, table: list[PartitionQueue], read_at: float) -> None:
        self.name = route.topic
        self.queues: list[LpQueue | None] = [None] * LP_COUNT
        self.waiting_for_route: dict[LpQueue, None] = {}
        self.rerouting = False
        self.adopt(route, table, read_at)

    def adopt(self, route: Route, table: list[PartitionQueue], read_at: float) -> None:
        """Use a route; queues follow once nothing is in flight."""
        self.route, self.table, self.read_at = route, table, read_at
        self.best_effort, self.body_limit = route.best_effort, route.body_limit

    @property
    def is_busy(self) -> bool:
        """Whether any message is unsettled."""
        return any(queue is not None and (queue.waiting or queue.in_flight) for queue in self.queues)

    def queue_of(self, lp: int, source: int | None) -> LpQueue:
        """Return an LP's queue."""
        queue = self.queues[lp]
        if queue is None:
            queue = self.queues[lp] = LpQueue(self, lp, source)
        return queue
