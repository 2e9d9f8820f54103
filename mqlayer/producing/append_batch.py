"""Batches: encoded appends. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import cast

from mqlayer.domain.names import BATCH_BYTES_LIMIT, BATCH_COUNT_LIMIT
from mqlayer.producing.send_queues import LpQueue, NodeQueue, PartitionQueue, PendingSend
from mqlayer.redis.durability import NO_WAIT
from mqlayer.redis.wire import bulk, bulk_number


class AppendBatch:
    """One append, encoded. With `once`, all have dedup ids."""

    __slots__ = (
        "chunks", "count", "heads", "once", "partition_queue", "pending_sends", "sent_at", "size", "source",
        "wait",
    )  # fmt: skip

    def __init__(self, partition_queue: PartitionQueue) -> None:
        self.partition_queue = partition_queue
        self.once = False
        self.source = 0
        self.pending_sends: list[PendingSend] = []
        self.heads: list[bytes] = []
        self.chunks: list[bytes] = []
        self.count = self.size = 0
        # Set where metrics are on.
        self.sent_at = 0.0
        self.wait = NO_WAIT

    @property
    def topic(self) -> str:
        """The topic's name; there must be a message."""
        return self.pending_sends[0].queue.topic.name

    def add(self, queue: LpQueue) -> bool:
        """Take a queue's next messages; return whether it is empty."""
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


def next_batch(node: NodeQueue, now: float) -> AppendBatch | None:
    """Take a node's next due batch, partitions in turn."""
    partition_queues = node.partition_queues
    for _ in range(len(partition_queues)):
        partition_queue = partition_queues.popleft()
        batch = _take_batch(partition_queue) if partition_queue.retry_at <= now else None
        if partition_queue.ready:
            partition_queues.append(partition_queue)
        else:
            partition_queue.listed = False
        if batch is not None:
            return batch
    return None


def _take_batch(partition_queue: PartitionQueue) -> AppendBatch | None:
    """Take up to 500 messages and 1 MB, or one message, of one source."""
    batch = AppendBatch(partition_queue)
    ready = partition_queue.ready
    while ready:
        queue = ready[0]
        if queue.blocked_by is None and queue.waiting and not batch.add(queue):
            return batch
        ready.popleft()
        queue.queued = False
    return batch if batch.pending_sends else None
