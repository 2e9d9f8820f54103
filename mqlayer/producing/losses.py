"""Acknowledged marks and losses. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Final, NamedTuple

from mqlayer.domain.routing import NodeId
from mqlayer.errors import AcknowledgedLoss, Loss
from mqlayer.events import Event, emit
from mqlayer.logs import event_logger
from mqlayer.producing.follow_ups import FollowUps
from mqlayer.producing.listeners import OnewayListener
from mqlayer.producing.producer_queues import ProducerQueues
from mqlayer.producing.send_counts import SendCounts
from mqlayer.producing.send_queues import Listener, LpQueue
from mqlayer.producing.settlement import SendSettlement

log = event_logger(__name__)

MAX_UNREPORTED_LOSSES: Final = 100_000
MAX_FORMER_SOURCES: Final = 100_000
"""Some 20 MB: a hundred losses in all LPs of a topic."""


class AcknowledgedMark(NamedTuple):
    """The mark that a partition must have."""

    queue: LpQueue
    source: int
    acked: int
    partition: int


class FormerSources:
    """Seqs acknowledged under queues' former sources, less reported losses.

    Only the loss detector finds their losses. Beyond `limit`, the oldest is logged and dropped.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._acked: dict[tuple[LpQueue, int], int] = {}

    def __iter__(self) -> Iterator[tuple[LpQueue, int, int]]:
        for (queue, source), acked in self._acked.items():
            yield queue, source, acked

    def add(self, queue: LpQueue, acked: int) -> None:
        """Keep the seq of a source being left."""
        if queue.source is None or not acked:
            return
        self._acked[queue, queue.source] = acked
        if len(self._acked) > self._limit:
            oldest = next(iter(self._acked))
            facts = {"topic": oldest[0].topic.name, "lp": oldest[0].lp, "source": oldest[1]}
            log.warning("former_source_forgotten", extra=facts | {"messages": self._acked.pop(oldest)})

    def lower(self, queue: LpQueue, source: int, mark: int) -> int:
        """Lower an entry to `mark`; return its former value, or 0."""
        acked = self._acked.get((queue, source), 0)
        if mark < acked:
            if mark:
                self._acked[queue, source] = mark
            else:
                del self._acked[queue, source]
        return acked


class LossListener(Listener):
    """Reports a loss to event hooks."""

    __slots__ = ("_event",)

    def __init__(self, loss: Loss, partition: int) -> None:
        super().__init__(0)
        self._event = Event(
            "acknowledged_loss", loss.topic, "", partition, loss.lp, loss.first, cause=loss.where, count=loss.messages
        )

    def notify(self) -> None:
        """Call the hooks."""
        emit(self._event)


class Losses:
    """Lost acknowledged messages. The next publish raises `unreported` ones."""

    def __init__(
        self, queues: ProducerQueues, settlement: SendSettlement, counts: SendCounts, follow_ups: FollowUps
    ) -> None:
        self.unreported: deque[Loss] = deque(maxlen=MAX_UNREPORTED_LOSSES)
        self.former = FormerSources(MAX_FORMER_SOURCES)
        self._queues, self._settlement, self._counts, self._follow_ups = queues, settlement, counts, follow_ups

    def take_unreported(self) -> tuple[Loss, ...]:
        """Return the unreported losses, once."""
        losses = tuple(self.unreported)
        self.unreported.clear()
        return losses

    def expected_marks(self, node_id: NodeId) -> list[AcknowledgedMark]:
        """Return marks that a node must have, under present and former sources."""
        present = (
            (queue, queue.source, queue.acked) for queue in self._queues if queue.acked and queue.source is not None
        )
        return [
            AcknowledgedMark(queue, source, acked, partition)
            for queue, source, acked in chain(self.former, present)
            for partition, of_node in {
                one.partition: one.node.node_id for one in (queue.partition_queue, queue.topic.table[queue.lp])
            }.items()
            if of_node == node_id
        ]

    def check_mark(self, expected: AcknowledgedMark, mark: int) -> None:
        """Handle a mark, read after `expected` from the armed run."""
        queue = expected.queue
        if mark >= expected.acked:
            return
        if queue.source != expected.source:
            self._lose_former(expected, mark)
            return
        self.note(queue, mark)
        # Answers for messages in flight are outstanding, and may report more losses.
        if not queue.in_flight:
            self.lose(queue)

    def note(self, queue: LpQueue, mark: int) -> None:
        """Block a queue with lost acknowledged messages; the lower mark counts."""
        queue.lost_after = min(mark, queue.lost_after) if queue.blocked_by == "lost" else mark
        self._queues.set_block(queue, "lost")

    def lose(self, queue: LpQueue) -> None:
        """Fail a queue's messages and restart it; none may be in flight.

        Lost seqs must never name other messages: groups that handled the lost ones would skip those. So the queue
        continues under a new incarnation.
        """
        partition_queue = queue.partition_queue
        loss = Loss(
            queue.topic.name, queue.lp, queue.lost_after + 1, queue.acked, queue.source or 0, *partition_queue.node.runs
        )
        self._count(loss, partition_queue.partition)
        if not queue.waiting or isinstance(queue.waiting[0].listener, OnewayListener):
            self.unreported.append(loss)
        if queue.waiting:
            self._settlement.fail(queue, 0, AcknowledgedLoss(loss))
        self._queues.unblock(queue)
        self.leave(queue, queue.lost_after)
        queue.restart(self._queues.source)

    def leave(self, queue: LpQueue, acked: int) -> None:
        """Keep a queue's acknowledged mark, and leave its source."""
        self.former.add(queue, acked)
        self._queues.leave_source(queue)

    def _lose_former(self, expected: AcknowledgedMark, mark: int) -> None:
        queue = expected.queue
        last = self.former.lower(queue, expected.source, mark)
        if mark >= last:
            return
        node = self._queues.partition_queues[expected.partition].node
        loss = Loss(queue.topic.name, queue.lp, mark + 1, last, expected.source, *node.runs)
        self.unreported.append(loss)
        self._count(loss, expected.partition)

    def _count(self, loss: Loss, partition: int) -> None:
        facts = {"topic": loss.topic, "lp": loss.lp, "reason": str(AcknowledgedLoss(loss))}
        log.error("acknowledged_messages_lost", extra=facts)
        self._counts.add(loss.topic, "lost", loss.messages)
        self._follow_ups.listeners.append(LossListener(loss, partition))
