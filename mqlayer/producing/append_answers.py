"""The meaning of nodes' answers to appends. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from mqlayer.domain.dedup import FirstPosition
from mqlayer.errors import BacklogFull, MqlayerError, NotReplicated, PublishError
from mqlayer.logs import event_logger, is_reported
from mqlayer.producing.append_batch import AppendBatch
from mqlayer.producing.backoff import backoff_s
from mqlayer.producing.follow_ups import FollowUps, RefreshLimits, StoredLookup
from mqlayer.producing.losses import Losses
from mqlayer.producing.outcomes import Appended, Duplicate, Recovered
from mqlayer.producing.producer_queues import Capacity, ProducerQueues
from mqlayer.producing.send_counts import SendCounts
from mqlayer.producing.send_queues import LpQueue, NodeQueue, PartitionQueue, PendingSend
from mqlayer.producing.settlement import NOTHING, SendSettlement
from mqlayer.redis.partition_scripts import AppendReply, OnceOutcome, Refused, RunOutcome

log = event_logger(__name__)


LACKING_S: Final = 1.0
"""The other servers of a cluster have so long by themselves, before what a class lacked somewhere is sent again."""

AppendAnswer = AppendReply | list[OnceOutcome] | Refused | PublishError
"""Stored in whole or in part, an outcome per message, misrouted, or refused by a limit."""


class _Answer(NamedTuple):
    """An append's effect on its stored messages."""

    outcome: Appended | MqlayerError
    replicas: int | None
    partition_queue: PartitionQueue


class AppendAnswers:
    """Applies answers in a connection's order."""

    def __init__(
        self,
        queues: ProducerQueues,
        settlement: SendSettlement,
        losses: Losses,
        *,
        capacity: Capacity,
        counts: SendCounts,
        follow_ups: FollowUps,
        require_replicas: int,
    ) -> None:
        self._queues, self._settlement, self._losses = queues, settlement, losses
        self._capacity, self._counts, self._follow_ups = capacity, counts, follow_ups
        self._require_replicas = require_replicas

    def apply(
        self,
        batch: AppendBatch,
        answer: AppendAnswer | None,
        replicas: int | None,
        unanswered: Iterable[AppendBatch],
        now: float,
    ) -> None:
        """Apply an answer; None if the append did not run. Then resolve queues that await no more answers."""
        if isinstance(answer, AppendReply):
            if answer.outcomes is None:
                self.stored(batch, answer.offset, replicas)
            else:
                self.mixed(batch, answer.offset, answer.outcomes, replicas)
        elif isinstance(answer, list):
            self.each(batch, answer, replicas)
        elif isinstance(answer, Refused):
            self.misrouted(batch, answer.status)
        elif answer is None:
            self.repeat(batch)
        else:
            self.refused(batch, answer, now)
        if self._queues.blocked:
            self.resolve_batch(batch, unanswered, now)

    # Stored, at least in part

    def stored(self, batch: AppendBatch, offset: int, replicas: int | None) -> None:
        """A batch was appended."""
        outcome = self._outcome(batch, replicas)
        if not isinstance(outcome, Appended) or (self._queues.blocked and self._queues.blocks(batch)):
            answer = _Answer(outcome, replicas, batch.partition_queue)
            for pending in batch.pending_sends:
                self._stored_send(pending, offset, 0, answer)
                offset += pending.count
            _clear_refusal(batch.partition_queue)
            return
        # The common case, inlined: it runs for every message.
        listeners = self._follow_ups.listeners
        for pending in batch.pending_sends:
            queue = pending.queue
            count = pending.count
            queue.in_flight.popleft()
            queue.acked = pending.first + count - 1
            pending.offset = offset
            pending.outcome = outcome
            pending.chunks = NOTHING
            offset += count
            listener = pending.listener
            if listener is not None:
                listener.remaining -= count
                if not listener.remaining:
                    listeners.append(listener)
        self._counts.add(batch.topic, "stored", batch.count)
        capacity = self._capacity
        capacity.count -= batch.count
        capacity.size -= batch.size
        capacity.freed = True
        _clear_refusal(batch.partition_queue)

    def mixed(self, batch: AppendBatch, offset: int, outcomes: Sequence[RunOutcome], replicas: int | None) -> None:
        """A batch's runs had different outcomes."""
        answer = self._answer(batch, replicas)
        for (queue, pending_sends), (status, appended, mark) in zip(batch.runs(), outcomes, strict=True):
            if status in ("ok", "dup"):
                early = sum(pending.count for pending in pending_sends) - appended
                for pending in pending_sends:
                    self._stored_send(pending, offset, min(early, pending.count), answer)
                    offset += max(0, pending.count - early)
                    early = max(0, early - pending.count)
            else:
                self._not_appended(queue, status, mark)
        _clear_refusal(batch.partition_queue)

    def each(self, batch: AppendBatch, outcomes: Sequence[OnceOutcome], replicas: int | None) -> None:
        """A dedup-id batch has an outcome per message."""
        answer = self._answer(batch, replicas)
        for pending, (status, offset, first, mark) in zip(batch.pending_sends, outcomes, strict=True):
            if status == "ok":
                self._stored_send(pending, offset, 0, answer)
            elif status == "dup":
                self._stored_before(pending, first, answer)
            elif status == "same" and first is not None:
                self._duplicate(pending, first, answer)
            else:
                self._not_appended(pending.queue, status, mark)
        _clear_refusal(batch.partition_queue)

    # Not stored, or unknown

    def refused(self, batch: AppendBatch, error: PublishError, now: float) -> None:
        """The partition refused a batch: pause it."""
        partition_queue = batch.partition_queue
        partition_queue.refusals += 1
        partition_queue.refusal = error
        partition_queue.retry_at = now + backoff_s(partition_queue.refusals)
        if partition_queue.refusals == 1:
            log.warning("publish_refused", extra={"partition": partition_queue.partition, "reason": str(error)})
        self.repeat(batch)
        if isinstance(error, BacklogFull):
            # The limit may have been raised.
            self._follow_ups.jobs += map(RefreshLimits, {queue.topic for queue in batch.queues()})
        self._queues.divert([partition_queue], now)
        for queue in list(partition_queue.ready):
            self._settlement.expire(queue, now)

    def repeat(self, batch: AppendBatch) -> None:
        """Nothing was stored: send it again."""
        for queue in batch.queues():
            self._queues.block(queue, "repeat")

    def misrouted(self, batch: AppendBatch, status: str) -> None:
        """Nothing was stored: get a newer route."""
        topic, partition = batch.topic, batch.partition_queue.partition
        log.info("publish_rerouted", extra={"topic": topic, "partition": partition, "word": status})
        for queue in batch.queues():
            self._queues.block(queue, "route")

    def disconnected(
        self,
        node: NodeQueue,
        batches: Sequence[AppendBatch],
        reason: str,
        now: float,
        lacking: Iterable[PartitionQueue] = (),
    ) -> None:
        """A connection failed; the batches' outcome is unknown: send them again later, `lacking` partitions' last."""
        queues = dict.fromkeys(queue for batch in batches for queue in batch.queues())
        for queue in queues:
            queue.note_uncertain()
            self._queues.block(queue, "repeat")
        self.resolve(queues, now)
        node.failures += 1
        node.retry_at = now + backoff_s(node.failures)
        node.last_error = reason
        for partition_queue in lacking:
            partition_queue.lack, partition_queue.retry_at = reason, node.retry_at + LACKING_S
        self._counts.connections_lost += 1
        if is_reported(node.failures):
            facts = {"node": node.runs[0], "reason": reason, "failures": node.failures}
            log.warning("producer_connection_lost", extra=facts)
        self._queues.divert(list(node.partition_queues), now)

    def resolve_batch(self, batch: AppendBatch, unanswered: Iterable[AppendBatch], now: float) -> None:
        """Resolve an answered batch's blocked queues, except those in unanswered batches."""
        later = {pending.queue for sent in unanswered for pending in sent.pending_sends}
        self.resolve([queue for queue in batch.queues() if queue not in later], now)

    def resolve(self, queues: Iterable[LpQueue], now: float) -> None:
        """Resolve blocked queues that await no more answers."""
        for queue in queues:
            blocked_by = queue.blocked_by
            if blocked_by is None:
                continue
            queue.requeue()
            if blocked_by == "lost":
                self._losses.lose(queue)
            elif not queue.waiting:
                # All that was refused turned out to be stored.
                self._queues.unblock(queue)
            elif blocked_by == "route":
                self._queues.wait_for_route(queue)
            else:
                self._queues.unblock(queue)
                self._queues.divert_queue(queue, now)
                self._settlement.expire(queue, now)
                self._queues.resume(queue)

    def _answer(self, batch: AppendBatch, replicas: int | None) -> _Answer:
        return _Answer(self._outcome(batch, replicas), replicas, batch.partition_queue)

    def _outcome(self, batch: AppendBatch, replicas: int | None) -> Appended | MqlayerError:
        partition_queue = batch.partition_queue
        if replicas is not None and replicas < self._require_replicas:
            return NotReplicated(batch.topic, partition_queue.partition, self._require_replicas, replicas)
        return Appended(partition_queue.partition, batch.source, replicas)

    def _stored_send(self, pending: PendingSend, offset: int, early: int, answer: _Answer) -> None:
        queue, outcome = pending.queue, answer.outcome
        self._take_in_flight(pending, answer)
        queue.acked = pending.last
        topic = queue.topic.name
        self._counts.add(topic, "stored", pending.count)
        if early:
            self._counts.add(topic, "repeated", early)
        if early and queue.source is not None:
            self._search(
                pending, early, Appended(answer.partition_queue.partition, queue.source, answer.replicas), offset
            )
            return
        if not isinstance(outcome, Appended):
            self._counts.add(topic, "unreplicated", pending.count)
        pending.offset = offset
        self._settlement.finish(pending, outcome)

    def _search(self, pending: PendingSend, early: int, where: Appended, offset: int) -> None:
        queue = pending.queue
        self._settlement.searched[pending] = where
        partition_queues = tuple(dict.fromkeys((queue.partition_queue, *queue.uncertain_at)))
        self._follow_ups.jobs.append(StoredLookup(pending, early, where, offset, partition_queues))

    def _stored_before(self, pending: PendingSend, first: FirstPosition | None, answer: _Answer) -> None:
        queue = pending.queue
        if first is None or first.identity != (queue.source, queue.lp, pending.first):
            self._stored_send(pending, 0, 1, answer)
            return
        self._take_in_flight(pending, answer)
        queue.acked = pending.last
        for one in ("stored", "repeated"):
            self._counts.add(queue.topic.name, one, 1)
        where = (_partition_of(first, answer), first.offset)
        self._settlement.finish(pending, Recovered(first.identity.source, answer.replicas, (where,)))

    def _duplicate(self, pending: PendingSend, first: FirstPosition, answer: _Answer) -> None:
        # The duplicate's number is free for the next message, unless a try had no answer: that one may still run after
        # the id is forgotten, and would take the number. Then the queue continues under a new incarnation.
        queue = pending.queue
        self._take_in_flight(pending, answer)
        if pending.first > queue.uncertain_to:
            queue.renumber(queue.source)
        else:
            self._losses.leave(queue, queue.acked)
            queue.renumber(self._queues.source)
        self._counts.add(queue.topic.name, "duplicates", 1)
        original = Duplicate(_partition_of(first, answer), first.offset, first.identity, answer.replicas)
        self._settlement.finish(pending, original if isinstance(answer.outcome, Appended) else answer.outcome)

    def _take_in_flight(self, pending: PendingSend, answer: _Answer) -> None:
        queue = pending.queue
        while queue.in_flight[0] is not pending:
            # This try was refused, but the chain accepted a later message, so an earlier try stored it.
            ahead = queue.in_flight[0]
            self._stored_send(ahead, 0, ahead.count, answer)
        queue.in_flight.popleft()

    def _not_appended(self, queue: LpQueue, status: str, mark: int) -> None:
        if status == "unowned":
            self._queues.block(queue, "route")
        elif mark < queue.acked:
            self._losses.note(queue, mark)
        else:
            # Overtaken: something before it was refused.
            self._queues.block(queue, "repeat")


def _partition_of(first: FirstPosition, answer: _Answer) -> int:
    return answer.partition_queue.partition if first.partition is None else first.partition


def _clear_refusal(partition_queue: PartitionQueue) -> None:
    if partition_queue.refusal is not None:
        partition_queue.refusals, partition_queue.refusal = 0, None
    partition_queue.lack = ""
