"""Waiting, ready, blocked and diverted messages. No I/O, no clock."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping

from mqlayer.domain.routing import Lp
from mqlayer.producing.append_batch import AppendBatch
from mqlayer.producing.follow_ups import FollowUps, RenewSource, Reroute
from mqlayer.producing.send_counts import SendCounts
from mqlayer.producing.send_queues import BlockReason, LpQueue, PartitionQueue, PendingSend, TopicQueues


class Capacity:
    """Counts unsettled messages and bytes, within bounds."""

    __slots__ = ("count", "freed", "max_bytes", "max_count", "size")

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count, self.max_bytes = max_count, max_bytes
        self.count = self.size = 0
        self.freed = False
        """Something was settled since the reader cleared this."""

    def has_room(self, count: int, size: int) -> bool:
        """Whether this much fits; always if nothing is pending."""
        return not self.count or (self.count + count <= self.max_count and self.size + size <= self.max_bytes)

    def take(self, count: int, size: int) -> None:
        """Add unsettled messages."""
        self.count += count
        self.size += size

    def free(self, count: int, size: int) -> None:
        """Remove settled ones."""
        self.count -= count
        self.size -= size
        self.freed = True


class ProducerQueues:
    """One producer's queues. `source` is None while a new one is registered."""

    def __init__(
        self, source: int, capacity: Capacity, counts: SendCounts, follow_ups: FollowUps, rng: random.Random
    ) -> None:
        self.source: int | None = source
        self.topics: dict[str, TopicQueues] = {}
        self.partition_queues: dict[int, PartitionQueue] = {}
        # Usually empty, so that `stored` need not check the queues of each answer.
        self.blocked: set[LpQueue] = set()
        self._capacity, self._counts, self._follow_ups, self._rng = capacity, counts, follow_ups, rng

    def __iter__(self) -> Iterator[LpQueue]:
        for topic in self.topics.values():
            yield from filter(None, topic.queues)

    def offer(self, topic: TopicQueues, lp: int, pending: PendingSend, now: float) -> bool:
        """`add` a pending send if there is room; else return False."""
        capacity = self._capacity
        if capacity.count and (
            capacity.count + pending.count > capacity.max_count or capacity.size + pending.size > capacity.max_bytes
        ):
            return False
        self.add(topic, lp, pending, now)
        return True

    def add(self, topic: TopicQueues, lp: int, pending: PendingSend, now: float) -> None:
        """Number and queue a pending send."""
        queue = topic.queues[lp] or topic.queue_of(lp, self.source)
        pending.queue = queue
        pending.first = queue.next_seq
        queue.next_seq += pending.count
        queue.waiting.append(pending)
        capacity = self._capacity
        capacity.count += pending.count
        capacity.size += pending.size
        if not queue.queued:
            self.enqueue(queue)
        if topic.best_effort:
            self.divert_queue(queue, now)

    def start_batch(
        self, topic: TopicQueues, pending_sends: Mapping[Lp, PendingSend], partition_queue: PartitionQueue, now: float
    ) -> AppendBatch | None:
        """Number pending sends; return a batch of those that can go, queue the others.

        The caller leads the sender and sends the batch next.
        """
        batch = AppendBatch(partition_queue)
        queues, add_fresh = topic.queues, batch.add_fresh
        for lp, pending in pending_sends.items():
            if (
                partition_queue.refusal is not None
                or partition_queue.lack
                or not add_fresh(queues[lp] or topic.queue_of(lp, self.source), pending)
            ):
                self.add(topic, lp, pending, now)
        self._capacity.take(batch.count, batch.size)
        return batch if batch.pending_sends else None

    def enqueue(self, queue: LpQueue) -> None:
        """List a queue as ready, unless blocked or empty."""
        if queue.queued or queue.blocked_by is not None or not queue.waiting or queue.source is None:
            return
        # An answer about messages in flight decides on those behind them, so both must use one connection.
        if not queue.in_flight:
            queue.partition_queue = queue.topic.table[queue.lp]
        partition_queue = queue.partition_queue
        partition_queue.ready.append(queue)
        queue.queued = True
        if not partition_queue.listed:
            partition_queue.listed = True
            partition_queue.node.partition_queues.append(partition_queue)

    # Blocked queues

    def block(self, queue: LpQueue, reason: BlockReason) -> None:
        """Block a queue, unless a message of its own blocks it."""
        if queue.blocked_by in (None, "once"):
            self.set_block(queue, reason)

    def block_behind(self, batch: AppendBatch) -> None:
        """Send nothing behind a dedup-id batch before its answer."""
        for pending in batch.pending_sends:
            self.set_block(pending.queue, "once")

    def set_block(self, queue: LpQueue, reason: BlockReason) -> None:
        """Block a queue for this reason."""
        queue.blocked_by = reason
        self.blocked.add(queue)

    def unblock(self, queue: LpQueue) -> None:
        """Let a queue send again."""
        queue.blocked_by = None
        self.blocked.discard(queue)

    def blocks(self, batch: AppendBatch) -> bool:
        """Whether a batch has messages of a blocked queue."""
        return not self.blocked.isdisjoint(pending.queue for pending in batch.pending_sends)

    def resume(self, queue: LpQueue) -> None:
        """Unblock and list a queue; wake its node, whose thread may sleep."""
        self.unblock(queue)
        self.enqueue(queue)
        if queue.queued:
            self._follow_ups.wake(queue.partition_queue.node)

    def wait_for_route(self, queue: LpQueue) -> None:
        """Keep a queue blocked until `release`."""
        head = queue.waiting[0].first
        queue.reroutes = queue.reroutes + 1 if queue.rerouted_seq == head else 1
        queue.rerouted_seq = head
        topic = queue.topic
        topic.waiting_for_route[queue] = None
        if not topic.rerouting:
            topic.rerouting = True
            self._follow_ups.jobs.append(Reroute(topic))

    def release(self, topic: TopicQueues) -> None:
        """Resume queues that waited for a route."""
        topic.rerouting = False
        stranded, topic.waiting_for_route = list(topic.waiting_for_route), {}
        for queue in stranded:
            self.resume(queue)

    # Incarnations

    def leave_source(self, queue: LpQueue) -> None:
        """Have a queue's source replaced, unless it was."""
        if queue.source == self.source:
            self.source = None
            self._follow_ups.jobs.append(RenewSource())

    def renew(self, source: int) -> None:
        """Give queues without a source this one."""
        self.source = source
        for queue in self:
            if queue.source is None:
                queue.source = source
                self.enqueue(queue)
                if queue.queued:
                    self._follow_ups.wake(queue.partition_queue.node)

    # Best effort

    def divert(self, partition_queues: Iterable[PartitionQueue], now: float) -> None:
        """Divert unsent messages of paused partitions (best-effort topics)."""
        for partition_queue in partition_queues:
            for queue in list(partition_queue.ready):
                self.divert_queue(queue, now)

    def divert_queue(self, queue: LpQueue, now: float) -> None:
        """`divert` for one queue. Messages that may be stored stay: elsewhere they might be stored twice."""
        topic = queue.topic
        if not topic.best_effort or not queue.waiting or not queue.partition_queue.is_paused(now):
            return
        free = [partition_queue for partition_queue in dict.fromkeys(topic.table) if not partition_queue.is_paused(now)]
        moved = queue.take_unsent() if free else []
        for pending in moved:
            self._capacity.size += pending.mark_reordered()
            partition_queue = self._rng.choice(free)
            lp = self._rng.choice([lp for lp, other in enumerate(topic.table) if other is partition_queue])
            other = topic.queues[lp] or topic.queue_of(lp, self.source)
            pending.queue, pending.first = other, other.next_seq
            other.next_seq += pending.count
            other.waiting.append(pending)
            self.enqueue(other)
            self._follow_ups.wake(other.partition_queue.node)
            self._counts.add(topic.name, "diverted", pending.count)
