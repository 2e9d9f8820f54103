"""Unsettled messages per LP and partition, guarded by the lock of `InFlight`. No I/O, no clock.

A queue's unsettled seqs, `acked` + 1 to `next_seq` - 1, are first `in_flight`, then `waiting`. A blocked queue sends
nothing until its last answer:

repeat   refused or overtaken: send again
route    its partition does not serve it: get a newer route
lost     the node lost acknowledged messages
once     a message with a dedup id is in flight
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Literal, cast

from mqlayer.domain.names import BATCH_BYTES_LIMIT, BATCH_COUNT_LIMIT
from mqlayer.domain.routing import LP_COUNT, Route
from mqlayer.errors import PublishError
from mqlayer.producing.pending_send import PendingSend
from mqlayer.redis.wire import bulk, bulk_number

if TYPE_CHECKING:
    from mqlayer.producing.node_sender import NodeSender

BlockReason = Literal["repeat", "route", "lost", "once"]


class LpQueue:
    """One LP of a topic. `source` is None until `InFlight.renew`.

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
        """Remove messages certainly not stored, except with a dedup id, which only this LP knows."""
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

    def remove(self, pending: PendingSend) -> bool:
        """Remove a message and close the gap; False if it does not wait or may be stored."""
        if pending.first <= self.uncertain_to or pending not in self.waiting:
            return False
        index = self.waiting.index(pending)
        behind = list(self.waiting)[index + 1 :]
        del self.waiting[index]
        # None behind it was sent, so their seqs may change.
        for later in behind:
            later.first -= pending.count
        self.next_seq -= pending.count
        return True

    def truncate(self, index: int) -> list[PendingSend]:
        """Remove waiting messages from an index on, and free their seqs."""
        gone = [self.waiting.pop() for _ in range(len(self.waiting) - index)]
        gone.reverse()
        self.next_seq = gone[0].first
        return gone


class PartitionQueue:
    """A partition and its ready queues. After a `refusal` it pauses until `retry_at`."""

    __slots__ = ("backlog_limit", "listed", "partition", "ready", "refusal", "refusals", "retry_at", "sender")

    def __init__(self, partition: int, sender: NodeSender, backlog_limit: int) -> None:
        self.partition, self.sender, self.backlog_limit = partition, sender, backlog_limit
        self.ready: deque[LpQueue] = deque()
        self.listed = False
        self.retry_at = 0.0
        self.refusals = 0
        self.refusal: PublishError | None = None

    def is_paused(self, now: float) -> bool:
        """Whether it or its node failed, and no retry is due."""
        return (self.refusal is not None and now < self.retry_at) or self.sender.is_unreachable(now)

    def take_batch(self) -> AppendBatch | None:
        """Take one append: up to 500 messages and 1 MB, or one message, of one source."""
        batch = AppendBatch(self)
        ready = self.ready
        while ready:
            queue = ready[0]
            if queue.blocked_by is None and queue.waiting and not batch.add(queue):
                return batch
            ready.popleft()
            queue.queued = False
        return batch if batch.pending_sends else None


class AppendBatch:
    """One append, encoded. With `once`, all have dedup ids."""

    __slots__ = ("chunks", "count", "heads", "once", "partition_queue", "pending_sends", "size", "source")

    def __init__(self, partition_queue: PartitionQueue) -> None:
        self.partition_queue = partition_queue
        self.once = False
        self.source = 0
        self.pending_sends: list[PendingSend] = []
        self.heads: list[bytes] = []
        self.chunks: list[bytes] = []
        self.count = self.size = 0

    def add(self, queue: LpQueue) -> bool:
        """Take a queue's next messages; return whether none is left."""
        source = queue.source
        if source is None or (self.source and self.source != source):
            return source is None
        waiting, in_flight = queue.waiting, queue.in_flight
        if waiting[0].token or self.once:
            return self._add_once(queue)
        first, count, size = waiting[0].first, self.count, self.size
        while waiting:
            pending = waiting[0]
            if pending.token:
                break
            if count and (count + pending.count > BATCH_COUNT_LIMIT or size + pending.size > BATCH_BYTES_LIMIT):
                break
            in_flight.append(waiting.popleft())
            self.pending_sends.append(pending)
            self.chunks += pending.chunks
            count += pending.count
            size += pending.size
        if count > self.count:
            self.source = source
            self.heads += (queue.lp_bulk, bulk_number(first), bulk_number(count - self.count))
            self.count, self.size = count, size
        return not waiting

    def _add_once(self, queue: LpQueue) -> bool:
        pending = queue.waiting[0]
        full = self.count == BATCH_COUNT_LIMIT or self.size + pending.size > BATCH_BYTES_LIMIT
        if not pending.token or (self.count and (full or not self.once)):
            return False
        self.once = True
        self.source = cast("int", queue.source)
        queue.in_flight.append(queue.waiting.popleft())
        self.pending_sends.append(pending)
        self.chunks += (queue.lp_bulk, bulk_number(pending.first), bulk(pending.token), *pending.chunks)
        self.count += 1
        self.size += pending.size
        return True

    def add_fresh(self, queue: LpQueue, pending: PendingSend) -> bool:
        """Take a new message past its queue; False if others wait there.

        The caller must send this batch next.
        """
        source = queue.source
        if queue.waiting or queue.blocked_by is not None or source is None or (self.source and self.source != source):
            return False
        if queue.partition_queue is not self.partition_queue:
            if queue.in_flight or queue.topic.table[queue.lp] is not self.partition_queue:
                return False
            queue.partition_queue = self.partition_queue
        self.source = source
        count = pending.count
        pending.queue = queue
        pending.first = first = queue.next_seq
        queue.next_seq = first + count
        queue.in_flight.append(pending)
        self.pending_sends.append(pending)
        self.heads += (queue.lp_bulk, bulk_number(first), bulk_number(count))
        self.chunks += pending.chunks
        self.count += count
        self.size += pending.size
        return True

    def runs(self) -> Iterator[tuple[LpQueue, list[PendingSend]]]:
        """Yield each queue and its pending sends."""
        for queue, pending_sends in groupby(self.pending_sends, key=lambda pending: pending.queue):
            yield queue, list(pending_sends)

    def queues(self) -> list[LpQueue]:
        """Return the queues, each once."""
        return list(dict.fromkeys(pending.queue for pending in self.pending_sends))


class TopicQueues:
    """A topic's newest known route and used queues."""

    __slots__ = ("best_effort", "name", "queues", "read_at", "rerouting", "route", "table", "waiting_for_route")

    def __init__(self, route: Route, table: list[PartitionQueue], read_at: float) -> None:
        self.name = route.topic
        self.queues: list[LpQueue | None] = [None] * LP_COUNT
        self.waiting_for_route: dict[LpQueue, None] = {}
        self.rerouting = False
        self.adopt(route, table, read_at)

    def adopt(self, route: Route, table: list[PartitionQueue], read_at: float) -> None:
        """Use a route; queues follow once nothing is in flight."""
        self.route, self.table, self.read_at = route, table, read_at
        self.best_effort = route.best_effort

    def queue_of(self, lp: int, source: int | None) -> LpQueue:
        """Return an LP's queue."""
        queue = self.queues[lp]
        if queue is None:
            queue = self.queues[lp] = LpQueue(self, lp, source)
        return queue
