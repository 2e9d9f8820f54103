"""A producer's unsettled messages, and the meaning of answers. No I/O."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final, Protocol

from mqlayer.domain.dedup import FirstPosition
from mqlayer.domain.routing import Lp
from mqlayer.errors import (
    AcknowledgedLoss,
    BacklogFull,
    Loss,
    MqlayerError,
    NotReplicated,
    ProducerClosed,
    ProducerFull,
    PublishAborted,
    PublishError,
)
from mqlayer.producing.backoff import backoff_s
from mqlayer.producing.losses import AcknowledgedMark, FormerSources, LossListener
from mqlayer.producing.pending_send import (
    NOTHING,
    Appended,
    Duplicate,
    Listener,
    OnewayListener,
    PendingSend,
    Recovered,
    SendOutcome,
)
from mqlayer.producing.send_queues import AppendBatch, BlockReason, LpQueue, PartitionQueue, TopicQueues
from mqlayer.redis.partition_scripts import OnceOutcome, RunOutcome

if TYPE_CHECKING:
    from mqlayer.producing.node_sender import NodeSender

log = logging.getLogger(__name__)

MAX_UNREPORTED_LOSSES: Final = 100_000
MAX_FORMER_SOURCES: Final = 100_000
"""Some 20 MB: a hundred losses in all LPs of a topic."""
CLOSED: Final = "it was closed before an answer came, so the message may or may not be stored"


@dataclass(frozen=True, slots=True)
class ProducerStats:
    """Counts of messages since the producer started."""

    stored: int
    repeated: int
    """Part of `stored`: an unanswered try stored them."""
    failed: int
    """Certainly not stored: refused until their deadline, or for good."""
    aborted: int
    """An earlier message of their LP failed."""
    withdrawn: int
    """Their futures were cancelled."""
    lost: int
    duplicates: int
    """Not stored: an earlier message has their dedup id."""
    diverted: int
    """Sent to another partition than their key's; counted again if that one refuses."""
    unreplicated: int
    """Stored, but on too few replicas in time."""
    connections_lost: int
    """How often a connection broke, was refused or got an error."""
    pending: int
    pending_bytes: int


class BackgroundRequests(Protocol):
    """Work for another thread. Called with the lock held: only note it."""

    def reroute(self, topic: TopicQueues) -> None:
        """Get a newer route, then `release` the topic."""

    def refresh_limits(self, topic: TopicQueues) -> None:
        """Read a topic's limits, unless fresh."""

    def renew(self) -> None:
        """Register a new incarnation."""

    def search(self, pending: PendingSend, early: int, appended: Appended, offset: int) -> None:
        """Find the first `early` messages; the others begin at `offset`."""


class InFlight:
    """One producer's queues and capacity. Set `background` before the first answer.

    Hold `lock`, except for `withdraw` and `raise_losses`. Release it, then pass returned listeners to `notify_all`.
    """

    background: BackgroundRequests

    def __init__(
        self,
        *,
        source: int,
        max_count: int,
        max_bytes: int,
        require_replicas: int,
        rng: random.Random | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.source: int | None = source
        self.topics: dict[str, TopicQueues] = {}
        self.partition_queues: dict[int, PartitionQueue] = {}
        self.searched: dict[PendingSend, Appended] = {}
        self.pending_count = self.pending_bytes = 0
        self.counts: Counter[str] = Counter()
        self.closed_because = ""
        self._max_count, self._max_bytes = max_count, max_bytes
        self._require_replicas = require_replicas
        self._watchers = 0
        self._rng = rng or random.Random()
        # The next publish raises these.
        self.unreported_losses: deque[Loss] = deque(maxlen=MAX_UNREPORTED_LOSSES)
        self._former = FormerSources(MAX_FORMER_SOURCES)
        # Usually empty, so that `stored` need not check the queues of each answer.
        self._blocked: set[LpQueue] = set()

    # Accepting messages

    def has_capacity(self, count: int, size: int) -> bool:
        """Whether this much may be added; always if nothing is pending."""
        return not self.pending_count or (
            self.pending_count + count <= self._max_count and self.pending_bytes + size <= self._max_bytes
        )

    def wait_for_capacity(self, count: int, size: int, until: float) -> None:
        """Wait for capacity. Raises ProducerFull (in callbacks at once) or ProducerClosed."""
        started = time.monotonic()
        while not self.closed_because and not self.has_capacity(count, size):
            wait_s = until - time.monotonic()
            if wait_s <= 0 or in_callback():
                raise ProducerFull(self.pending_count, self.pending_bytes, time.monotonic() - started)
            self.wait_for_change(wait_s)
        if self.closed_because:
            raise ProducerClosed(self.closed_because)

    def wait_for_change(self, timeout_s: float) -> None:
        """Wait for a settled message or the timeout."""
        self._watchers += 1
        try:
            self.changed.wait(timeout_s)
        finally:
            self._watchers -= 1

    def add(self, topic: TopicQueues, lp: int, pending: PendingSend) -> LpQueue:
        """Number and queue a pending send."""
        queue = topic.queues[lp] or topic.queue_of(lp, self.source)
        pending.queue = queue
        pending.first = queue.next_seq
        queue.next_seq += pending.count
        queue.waiting.append(pending)
        self.pending_count += pending.count
        self.pending_bytes += pending.size
        if not queue.queued:
            self.enqueue(queue)
        if topic.best_effort:
            self._divert(queue, time.monotonic())
        return queue

    def start_batch(
        self, topic: TopicQueues, pending_sends: Mapping[Lp, PendingSend], partition_queue: PartitionQueue
    ) -> AppendBatch | None:
        """Number pending sends; return a batch of those that can go, queue the others.

        The caller leads the sender and sends the batch next.
        """
        batch = AppendBatch(partition_queue)
        queues, add_fresh = topic.queues, batch.add_fresh
        for lp, pending in pending_sends.items():
            if partition_queue.refusal is not None or not add_fresh(
                queues[lp] or topic.queue_of(lp, self.source), pending
            ):
                self.add(topic, lp, pending)
        self.pending_count += batch.count
        self.pending_bytes += batch.size
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
            partition_queue.sender.partition_queues.append(partition_queue)

    # Answers

    def stored(self, batch: AppendBatch, offset: int, replicas: int | None) -> list[Listener]:
        """A batch was appended."""
        outcome = self._outcome_of(batch, replicas)
        listeners: list[Listener] = []
        if not isinstance(outcome, Appended) or (self._blocked and self._is_blocked(batch)):
            for pending in batch.pending_sends:
                listeners += self._stored_send(pending, offset, 0, outcome, replicas, batch.partition_queue)
                offset += pending.count
            self._clear_refusal(batch.partition_queue)
            return listeners
        # The common case, inlined: it runs for every message.
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
        self.counts["stored"] += batch.count
        self._release_capacity(batch.count, batch.size)
        self._clear_refusal(batch.partition_queue)
        return listeners

    def mixed(
        self, batch: AppendBatch, offset: int, outcomes: Sequence[RunOutcome], replicas: int | None
    ) -> list[Listener]:
        """A batch's runs had different outcomes."""
        where = self._outcome_of(batch, replicas)
        listeners: list[Listener] = []
        for (queue, pending_sends), (status, appended, mark) in zip(batch.runs(), outcomes, strict=True):
            if status in ("ok", "dup"):
                early = sum(pending.count for pending in pending_sends) - appended
                for pending in pending_sends:
                    listeners += self._stored_send(
                        pending, offset, min(early, pending.count), where, replicas, batch.partition_queue
                    )
                    offset += max(0, pending.count - early)
                    early = max(0, early - pending.count)
            else:
                self._not_appended(queue, status, mark)
        self._clear_refusal(batch.partition_queue)
        return listeners

    def block_behind(self, batch: AppendBatch) -> None:
        """Send nothing behind a dedup-id batch before its answer."""
        for pending in batch.pending_sends:
            self._note_block(pending.queue, "once")

    def each(self, batch: AppendBatch, outcomes: Sequence[OnceOutcome], replicas: int | None) -> list[Listener]:
        """Settle a dedup-id batch."""
        where = self._outcome_of(batch, replicas)
        listeners: list[Listener] = []
        for pending, (status, offset, first, mark) in zip(batch.pending_sends, outcomes, strict=True):
            if status == "ok":
                listeners += self._stored_send(pending, offset, 0, where, replicas, batch.partition_queue)
            elif status == "dup":
                listeners += self._stored_before(pending, first, where, replicas, batch.partition_queue)
            elif status == "same" and first is not None:
                listeners += self._duplicate(pending, first, where, replicas, batch.partition_queue)
            else:
                self._not_appended(pending.queue, status, mark)
        self._clear_refusal(batch.partition_queue)
        return listeners

    def refused(self, batch: AppendBatch, error: PublishError, now: float) -> list[Listener]:
        """The partition refused a batch; leave it alone for a while."""
        partition_queue = batch.partition_queue
        partition_queue.refusals += 1
        partition_queue.refusal = error
        partition_queue.retry_at = now + backoff_s(partition_queue.refusals)
        if partition_queue.refusals == 1:
            log.warning("publish_refused", extra={"partition": partition_queue.partition, "reason": str(error)})
        self.repeat(batch)
        listeners: list[Listener] = []
        if isinstance(error, BacklogFull):
            # The limit may have been raised.
            for topic in {queue.topic for queue in batch.queues()}:
                self.background.refresh_limits(topic)
        self.divert([partition_queue], now)
        for queue in list(partition_queue.ready):
            listeners += self.expire(queue, now)
        return listeners

    def repeat(self, batch: AppendBatch) -> None:
        """Nothing was stored: send it again."""
        for queue in batch.queues():
            self._block(queue, "repeat")

    def misrouted(self, batch: AppendBatch) -> None:
        """Nothing was stored: get a newer route."""
        for queue in batch.queues():
            self._block(queue, "route")

    def unknown(self, batches: Iterable[AppendBatch]) -> None:
        """Their connection broke: send these batches again."""
        for queue in dict.fromkeys(queue for batch in batches for queue in batch.queues()):
            queue.note_uncertain()
            self._block(queue, "repeat")

    def resolve(self, queues: Iterable[LpQueue], now: float) -> list[Listener]:
        """Resolve blocked queues that await no more answers."""
        listeners: list[Listener] = []
        for queue in queues:
            blocked_by = queue.blocked_by
            if blocked_by is None:
                continue
            queue.requeue()
            if blocked_by == "lost":
                listeners += self._lose(queue)
            elif not queue.waiting:
                # All that was refused turned out to be stored.
                self._unblock(queue)
            elif blocked_by == "route":
                self._wait_for_route(queue)
            else:
                self._unblock(queue)
                self._divert(queue, now)
                listeners += self.expire(queue, now)
                self.enqueue(queue)
        return listeners

    def located(self, pending: PendingSend, outcome: Recovered | MqlayerError) -> list[Listener]:
        """Settle a pending send after `search`."""
        if pending not in self.searched:
            return []
        del self.searched[pending]
        return self._finish(pending, outcome)

    # Losses

    def expected_marks(self, sender: NodeSender) -> list[AcknowledgedMark]:
        """Return marks that a node must have, under present and former sources."""
        present = (
            (queue, queue.source, queue.acked)
            for queue in self._all_queues()
            if queue.acked and queue.source is not None
        )
        return [
            AcknowledgedMark(queue, source, acked, partition_queue.partition)
            for queue, source, acked in chain(self._former, present)
            for partition_queue in dict.fromkeys((queue.partition_queue, queue.topic.table[queue.lp]))
            if partition_queue.sender is sender
        ]

    def check_mark(self, expected: AcknowledgedMark, mark: int) -> list[Listener]:
        """Handle a mark, read after `expected` from the armed run."""
        queue = expected.queue
        if mark >= expected.acked:
            return []
        if queue.source != expected.source:
            return self._lose_former(expected, mark)
        self._note_lost(queue, mark)
        # Answers for messages in flight are outstanding, and may report more losses.
        return [] if queue.in_flight else self.resolve([queue], 0.0)

    def raise_losses(self) -> None:
        """Raise AcknowledgedLoss if losses are unreported."""
        with self.lock:
            losses = tuple(self.unreported_losses)
            self.unreported_losses.clear()
        if losses:
            raise AcknowledgedLoss(*losses[0], losses[1:])

    # Best effort

    def divert(self, partition_queues: Iterable[PartitionQueue], now: float) -> None:
        """Divert unsent messages of paused partitions (best-effort topics)."""
        for partition_queue in partition_queues:
            for queue in list(partition_queue.ready):
                self._divert(queue, now)

    def _divert(self, queue: LpQueue, now: float) -> None:
        # Messages that may be stored stay: elsewhere they might be stored twice.
        topic = queue.topic
        if not topic.best_effort or not queue.waiting or not queue.partition_queue.is_paused(now):
            return
        free = [partition_queue for partition_queue in dict.fromkeys(topic.table) if not partition_queue.is_paused(now)]
        moved = queue.take_unsent() if free else []
        for pending in moved:
            self.pending_bytes += pending.mark_reordered()
            partition_queue = self._rng.choice(free)
            lp = self._rng.choice([lp for lp, other in enumerate(topic.table) if other is partition_queue])
            other = topic.queues[lp] or topic.queue_of(lp, self.source)
            pending.queue, pending.first = other, other.next_seq
            other.next_seq += pending.count
            other.waiting.append(pending)
            self.enqueue(other)
            other.partition_queue.sender.wake_locked()
            self.counts["diverted"] += pending.count

    # Failures

    def expire(self, queue: LpQueue, now: float) -> list[Listener]:
        """Fail a refused queue from its first expired message on."""
        refusal = queue.partition_queue.refusal
        index = queue.first_expired(now, full=isinstance(refusal, BacklogFull)) if refusal is not None else None
        if refusal is None or index is None:
            return []
        return self._fail(queue, index, refusal)

    def refuse_eager(self, pending: PendingSend, now: float) -> list[Listener]:
        """Fail a new eager send to a full partition."""
        partition_queue = pending.queue.partition_queue
        if not pending.eager or now >= partition_queue.retry_at or not isinstance(partition_queue.refusal, BacklogFull):
            return []
        return self.expire(pending.queue, now)

    def withdraw(self, pending: PendingSend) -> bool:
        """Withdraw a send that is refused and certainly not stored; else False."""
        with self.lock:
            queue = pending.queue
            if pending.outcome is not None or queue.partition_queue.refusal is None or not queue.remove(pending):
                return False
            self.counts["withdrawn"] += pending.count
            pending.listener = None
            self._finish(pending, PublishAborted(queue.topic.name, queue.lp, "it was withdrawn"))
            return True

    def abandon(self, pending: PendingSend, now: float) -> list[Listener]:
        """Fail an overdue send that is refused and certainly not stored."""
        pending.deadline = min(pending.deadline, now)
        queue = pending.queue
        refusal = queue.partition_queue.refusal
        if (
            pending.outcome is None
            and refusal is not None
            and pending.first > queue.uncertain_to
            and pending in queue.waiting
        ):
            return self._fail(queue, queue.waiting.index(pending), refusal)
        return []

    def fail_certain(self, partition_queues: Iterable[PartitionQueue], error: MqlayerError) -> list[Listener]:
        """Fail messages that are certainly not stored."""
        listeners: list[Listener] = []
        for partition_queue in partition_queues:
            for queue in list(partition_queue.ready):
                index = next((i for i, p in enumerate(queue.waiting) if p.first > queue.uncertain_to), None)
                if index is not None and queue.blocked_by is None:
                    listeners += self._fail(queue, index, error)
        return listeners

    def fail_remaining(self) -> list[Listener]:
        """Fail everything, at close."""
        listeners: list[Listener] = []
        for queue in self._all_queues():
            queue.requeue()
            while queue.waiting:
                listeners += self._finish(queue.waiting.popleft(), ProducerClosed(CLOSED))
        for pending, where in list(self.searched.items()):
            listeners += self.located(
                pending, Recovered(where.source, where.replicas, ((where.partition, None),) * pending.count)
            )
        return listeners

    # New incarnations and routes

    def renew(self, source: int) -> None:
        """Give queues without a source this one."""
        self.source = source
        for queue in self._all_queues():
            if queue.source is None:
                queue.source = source
                self.enqueue(queue)

    def release(self, topic: TopicQueues) -> None:
        """Resume queues that waited for a route."""
        stranded, topic.waiting_for_route = list(topic.waiting_for_route), {}
        for queue in stranded:
            self._unblock(queue)
            self.enqueue(queue)

    def stats(self) -> ProducerStats:
        """The counts so far."""
        return ProducerStats(
            **{name: self.counts[name] for name in COUNTED},
            pending=self.pending_count,
            pending_bytes=self.pending_bytes,
        )

    def _all_queues(self) -> Iterator[LpQueue]:
        for topic in self.topics.values():
            yield from filter(None, topic.queues)

    def _stored_send(
        self,
        pending: PendingSend,
        offset: int,
        early: int,
        outcome: Appended | MqlayerError,
        replicas: int | None,
        partition_queue: PartitionQueue,
    ) -> list[Listener]:
        queue = pending.queue
        listeners = self._take_in_flight(pending, outcome, replicas, partition_queue)
        queue.acked = pending.last
        self.counts["stored"] += pending.count
        self.counts["repeated"] += early
        if early and queue.source is not None:
            where = Appended(partition_queue.partition, queue.source, replicas)
            self.searched[pending] = where
            self.background.search(pending, early, where, offset)
            return listeners
        if not isinstance(outcome, Appended):
            self.counts["unreplicated"] += pending.count
        pending.offset = offset
        return listeners + self._finish(pending, outcome)

    def _stored_before(
        self,
        pending: PendingSend,
        first: FirstPosition | None,
        outcome: Appended | MqlayerError,
        replicas: int | None,
        partition_queue: PartitionQueue,
    ) -> list[Listener]:
        queue = pending.queue
        if first is None or first.identity != (queue.source, queue.lp, pending.first):
            return self._stored_send(pending, 0, 1, outcome, replicas, partition_queue)
        listeners = self._take_in_flight(pending, outcome, replicas, partition_queue)
        queue.acked = pending.last
        self.counts["stored"] += 1
        self.counts["repeated"] += 1
        where = (partition_queue.partition if first.partition is None else first.partition, first.offset)
        return listeners + self._finish(pending, Recovered(first.identity.source, replicas, (where,)))

    def _duplicate(
        self,
        pending: PendingSend,
        first: FirstPosition,
        outcome: Appended | MqlayerError,
        replicas: int | None,
        partition_queue: PartitionQueue,
    ) -> list[Listener]:
        # The duplicate's number is free for the next message, unless a try had no answer: that one may still run after
        # the id is forgotten, and would take the number. Then the queue continues under a new incarnation.
        queue = pending.queue
        listeners = self._take_in_flight(pending, outcome, replicas, partition_queue)
        if pending.first > queue.uncertain_to:
            queue.renumber(queue.source)
        else:
            self._former.add(queue, queue.acked)
            if queue.source == self.source:
                self.source = None
                self.background.renew()
            queue.renumber(self.source)
        self.counts["duplicates"] += 1
        partition = partition_queue.partition if first.partition is None else first.partition
        original = Duplicate(partition, first.offset, first.identity, replicas)
        return listeners + self._finish(pending, original if isinstance(outcome, Appended) else outcome)

    def _take_in_flight(
        self,
        pending: PendingSend,
        outcome: Appended | MqlayerError,
        replicas: int | None,
        partition_queue: PartitionQueue,
    ) -> list[Listener]:
        queue = pending.queue
        listeners: list[Listener] = []
        while queue.in_flight[0] is not pending:
            # This try was refused, but the chain accepted a later message, so an earlier try stored it.
            ahead = queue.in_flight[0]
            listeners += self._stored_send(ahead, 0, ahead.count, outcome, replicas, partition_queue)
        queue.in_flight.popleft()
        return listeners

    def _not_appended(self, queue: LpQueue, status: str, mark: int) -> None:
        if status == "unowned":
            self._block(queue, "route")
        elif mark < queue.acked:
            self._note_lost(queue, mark)
        else:
            # Overtaken: something before it was refused.
            self._block(queue, "repeat")

    def _block(self, queue: LpQueue, blocked_by: BlockReason) -> None:
        if queue.blocked_by in (None, "once"):
            self._note_block(queue, blocked_by)

    def _note_block(self, queue: LpQueue, blocked_by: BlockReason) -> None:
        queue.blocked_by = blocked_by
        self._blocked.add(queue)

    def _note_lost(self, queue: LpQueue, mark: int) -> None:
        # Of two partitions' marks, the lower one counts.
        queue.lost_after = min(mark, queue.lost_after) if queue.blocked_by == "lost" else mark
        self._note_block(queue, "lost")

    def _unblock(self, queue: LpQueue) -> None:
        queue.blocked_by = None
        self._blocked.discard(queue)

    def _is_blocked(self, batch: AppendBatch) -> bool:
        return not self._blocked.isdisjoint(pending.queue for pending in batch.pending_sends)

    def _outcome_of(self, batch: AppendBatch, replicas: int | None) -> Appended | MqlayerError:
        if replicas is not None and replicas < self._require_replicas:
            partition_queue = batch.partition_queue
            name = batch.pending_sends[0].queue.topic.name
            return NotReplicated(name, partition_queue.partition, self._require_replicas, replicas)
        return Appended(batch.partition_queue.partition, batch.source, replicas)

    def _clear_refusal(self, partition_queue: PartitionQueue) -> None:
        if partition_queue.refusal is not None:
            partition_queue.refusals, partition_queue.refusal = 0, None

    def _wait_for_route(self, queue: LpQueue) -> None:
        head = queue.waiting[0].first
        queue.reroutes = queue.reroutes + 1 if queue.rerouted_seq == head else 1
        queue.rerouted_seq = head
        topic = queue.topic
        topic.waiting_for_route[queue] = None
        if not topic.rerouting:
            topic.rerouting = True
            self.background.reroute(topic)

    def _lose(self, queue: LpQueue) -> list[Listener]:
        # Lost seqs must never name other messages: groups that handled the lost ones would skip those. So the queue
        # continues under a new incarnation.
        sender = queue.partition_queue.sender
        loss = Loss(queue.topic.name, queue.lp, queue.lost_after + 1, queue.acked, queue.source or 0, *sender.runs)
        error = AcknowledgedLoss(*loss)
        listeners = self._count_loss(loss, queue.partition_queue.partition)
        if not queue.waiting or isinstance(queue.waiting[0].listener, OnewayListener):
            self.unreported_losses.append(loss)
        if queue.waiting:
            listeners += self._fail(queue, 0, error)
        if queue.source == self.source:
            self.source = None
            self.background.renew()
        self._unblock(queue)
        self._former.add(queue, queue.lost_after)
        queue.restart(self.source)
        return listeners

    def _lose_former(self, expected: AcknowledgedMark, mark: int) -> list[Listener]:
        queue = expected.queue
        last = self._former.lower(queue, expected.source, mark)
        if mark >= last:
            return []
        loss = Loss(
            queue.topic.name,
            queue.lp,
            mark + 1,
            last,
            expected.source,
            *self.partition_queues[expected.partition].sender.runs,
        )
        self.unreported_losses.append(loss)
        return self._count_loss(loss, expected.partition)

    def _count_loss(self, loss: Loss, partition: int) -> list[Listener]:
        facts = {"topic": loss.topic, "lp": loss.lp, "reason": str(AcknowledgedLoss(*loss))}
        log.error("acknowledged_messages_lost", extra=facts)
        self.counts["lost"] += loss.messages
        return [LossListener(loss, partition)]

    def _fail(self, queue: LpQueue, index: int, error: MqlayerError) -> list[Listener]:
        first, *behind = queue.truncate(index)
        self.counts["failed"] += first.count
        listeners = self._finish(first, _copy(error))
        for pending in behind:
            self.counts["aborted"] += pending.count
            listeners += self._finish(pending, PublishAborted(queue.topic.name, queue.lp, str(error)))
        return listeners

    def _finish(self, pending: PendingSend, outcome: SendOutcome | MqlayerError) -> list[Listener]:
        pending.outcome = outcome
        pending.chunks = NOTHING
        self._release_capacity(pending.count, pending.size)
        listener = pending.listener
        if listener is None:
            return []
        if isinstance(outcome, MqlayerError):
            listener.failed(pending)
        listener.remaining -= pending.count
        return [] if listener.remaining else [listener]

    def _release_capacity(self, count: int, size: int) -> None:
        self.pending_count -= count
        self.pending_bytes -= size
        if self._watchers:
            self.changed.notify_all()


COUNTED: Final = (
    "stored",
    "repeated",
    "failed",
    "aborted",
    "withdrawn",
    "lost",
    "duplicates",
    "diverted",
    "unreplicated",
    "connections_lost",
)


class _CallbackState(threading.local):
    now = False


_callback = _CallbackState()


def notify_all(listeners: Sequence[Listener]) -> None:
    """Notify listeners. Call without the lock: application callbacks run here."""
    if not listeners:
        return
    before, _callback.now = _callback.now, True
    try:
        for listener in listeners:
            listener.notify()
    finally:
        _callback.now = before


def in_callback() -> bool:
    """Whether this thread runs a callback, and so must not wait."""
    return _callback.now


def _copy(error: MqlayerError) -> MqlayerError:
    # Two threads must not raise one object.
    return type(error)(*error.args)
