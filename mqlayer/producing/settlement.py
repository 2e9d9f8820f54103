"""Settle messages; fail those certainly not stored. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from mqlayer.errors import BacklogFull, MqlayerError, ProducerClosed, PublishAborted
from mqlayer.producing.follow_ups import FollowUps
from mqlayer.producing.outcomes import Appended, Recovered, SendOutcome
from mqlayer.producing.producer_queues import Capacity, ProducerQueues
from mqlayer.producing.send_counts import SendCounts
from mqlayer.producing.send_queues import LpQueue, PartitionQueue, PendingSend, TopicQueues

NOTHING: Final[tuple[bytes, ...]] = ()
CLOSED: Final = "it was closed before an answer came, so the message may or may not be stored"


class SendSettlement:
    """Sets outcomes, once each. `searched`: stored sends whose places are looked up."""

    def __init__(self, queues: ProducerQueues, capacity: Capacity, counts: SendCounts, follow_ups: FollowUps) -> None:
        self.searched: dict[PendingSend, Appended] = {}
        self._queues, self._capacity, self._counts, self._follow_ups = queues, capacity, counts, follow_ups

    def finish(self, pending: PendingSend, outcome: SendOutcome) -> None:
        """Settle a send outside of queues."""
        pending.outcome = outcome
        pending.chunks = NOTHING
        self._capacity.free(pending.count, pending.size)
        listener = pending.listener
        if listener is None:
            return
        if isinstance(outcome, MqlayerError):
            listener.failed(pending)
        listener.remaining -= pending.count
        if not listener.remaining:
            self._follow_ups.listeners.append(listener)

    def located(self, pending: PendingSend, outcome: Recovered | MqlayerError) -> None:
        """Settle a searched send."""
        if self.searched.pop(pending, None) is not None:
            self.finish(pending, outcome)

    def fail(self, queue: LpQueue, index: int, error: MqlayerError) -> None:
        """Fail a queue's messages from an index on; those behind the first are aborted."""
        first, *behind = queue.truncate(index)
        topic = queue.topic.name
        self._counts.add(topic, "failed", first.count, type(error).__name__)
        self.finish(first, _copy(error))
        for pending in behind:
            self._counts.add(topic, "aborted", pending.count)
            self.finish(pending, PublishAborted(topic, queue.lp, str(error)))

    def expire(self, queue: LpQueue, now: float) -> None:
        """Fail a refused queue from its first expired message on."""
        refusal = queue.partition_queue.refusal
        if refusal is None:
            return
        index = queue.first_expired(now, full=isinstance(refusal, BacklogFull))
        if index is not None:
            self.fail(queue, index, refusal)

    def refuse_eager(self, pending: PendingSend, now: float) -> None:
        """Fail a new eager send to a full partition."""
        partition_queue = pending.queue.partition_queue
        if pending.eager and now < partition_queue.retry_at and isinstance(partition_queue.refusal, BacklogFull):
            self.expire(pending.queue, now)

    def withdraw(self, pending: PendingSend) -> bool:
        """Withdraw a send certainly not stored; else False."""
        queue = pending.queue
        if pending.outcome is not None or not queue.is_unsent(pending):
            return False
        queue.remove(pending)
        self._counts.add(queue.topic.name, "withdrawn", pending.count)
        pending.listener = None
        self.finish(pending, PublishAborted(queue.topic.name, queue.lp, "it was withdrawn"))
        return True

    def abandon(self, pending: PendingSend, now: float) -> None:
        """Fail an overdue, refused send certainly not stored."""
        pending.deadline = min(pending.deadline, now)
        queue = pending.queue
        refusal = queue.partition_queue.refusal
        if pending.outcome is None and refusal is not None and queue.is_unsent(pending):
            self.fail(queue, queue.waiting.index(pending), refusal)

    def fail_certain(self, partition_queues: Iterable[PartitionQueue], error: MqlayerError) -> None:
        """Fail messages that are certainly not stored."""
        for partition_queue in partition_queues:
            for queue in list(partition_queue.ready):
                index = next((i for i, p in enumerate(queue.waiting) if p.first > queue.uncertain_to), None)
                if index is not None and queue.blocked_by is None:
                    self.fail(queue, index, error)

    def fail_unrouted(self, topic: TopicQueues, error: MqlayerError) -> None:
        """Fail messages of a deleted topic that wait for its route."""
        for queue in topic.waiting_for_route:
            if queue.waiting:
                self.fail(queue, 0, error)

    def fail_remaining(self) -> None:
        """Fail everything, at close."""
        for queue in self._queues:
            queue.requeue()
            while queue.waiting:
                self.finish(queue.waiting.popleft(), ProducerClosed(CLOSED))
        for pending, where in list(self.searched.items()):
            self.located(pending, Recovered(where.source, where.replicas, ((where.partition, None),) * pending.count))


def _copy(error: MqlayerError) -> MqlayerError:
    # Two threads must not raise one object.
    return type(error)(*error.args)
