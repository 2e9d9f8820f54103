"""What a producer knows of its messages, and what answers mean for them. No I/O.

Everything here is guarded by `lock`. Methods return the listeners to be told; `notify_all` does so without the lock.
"""

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
"""How many sources that queues left are looked after: some 20 MB, a hundred losses of a topic in all its LPs."""
CLOSED: Final = "it was closed before an answer came, so the message may or may not be stored"


@dataclass(frozen=True, slots=True)
class ProducerStats:
    """Counts of messages since the producer started; `pending` ones are not settled yet."""

    stored: int
    """Have a place in a partition."""
    repeated: int
    """Of those: an earlier try, whose answer was lost, had stored them."""
    failed: int
    """Certainly not stored: refused until their time was over."""
    aborted: int
    """Not sent, because an earlier message of their LP failed."""
    withdrawn: int
    """Not sent, because their futures were cancelled."""
    lost: int
    """Were acknowledged, and a node lost them."""
    duplicates: int
    """Were not stored, because one with their dedup id was."""
    diverted: int
    """Went to another partition than their key's, in topics of the strategy best_effort; twice, if that one refused."""
    unreplicated: int
    """Are stored, but fewer replicas than required received them in time."""
    connections_lost: int
    """How often a connection broke, was refused or answered with an error."""
    pending: int
    pending_bytes: int


class BackgroundRequests(Protocol):
    """What a in-flight store needs done elsewhere; called under the lock, so it must only be noted then."""

    def reroute(self, topic: TopicQueues) -> None:
        """Get a newer route and release the topic's stranded queues."""

    def refresh_limits(self, topic: TopicQueues) -> None:
        """Read a topic's limits again, unless that was done just now."""

    def renew(self) -> None:
        """Register a new incarnation."""

    def search(self, pending: PendingSend, early: int, appended: Appended, offset: int) -> None:
        """Find the first `early` messages of a pending send, stored by an earlier try; the others are at the place."""


class InFlight:
    """The queues, partition queues and bounds of one producer.

    `background` must be set before the first answer comes.
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
        # What nobody was told of: who publishes next hears it.
        self.unreported_losses: deque[Loss] = deque(maxlen=MAX_UNREPORTED_LOSSES)
        self._former = FormerSources(MAX_FORMER_SOURCES)
        # The queues with trouble: mostly none, so that no answer is looked through for them.
        self._blocked: set[LpQueue] = set()

    # Taking messages in

    def has_capacity(self, count: int, size: int) -> bool:
        """Say whether so much may be added; one pending send always may."""
        return not self.pending_count or (
            self.pending_count + count <= self._max_count and self.pending_bytes + size <= self._max_bytes
        )

    def wait_for_capacity(self, count: int, size: int, until: float) -> None:
        """Return when so much may be added; call with the lock held. Raises ProducerFull or ProducerClosed."""
        started = time.monotonic()
        while not self.closed_because and not self.has_capacity(count, size):
            wait_s = until - time.monotonic()
            if wait_s <= 0 or in_callback():
                raise ProducerFull(self.pending_count, self.pending_bytes, time.monotonic() - started)
            self.wait_for_change(wait_s)
        if self.closed_because:
            raise ProducerClosed(self.closed_because)

    def wait_for_change(self, timeout_s: float) -> None:
        """Wait until something is settled, or for the time; call with the lock held."""
        self._watchers += 1
        try:
            self.changed.wait(timeout_s)
        finally:
            self._watchers -= 1

    def add(self, topic: TopicQueues, lp: int, pending: PendingSend) -> LpQueue:
        """Give a pending send its seqs and queue it."""
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
        """Give pending sends their seqs; return a batch of those that may be sent at once, and queue the others.

        The caller holds the partition queue's sender and has to send the batch before anything else.
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
        """Have what waits in a queue sent, unless something holds it up."""
        if queue.queued or queue.blocked_by is not None or not queue.waiting or queue.source is None:
            return
        # Answers about what flies decide about what is behind it, so both must go the same way.
        if not queue.in_flight:
            queue.partition_queue = queue.topic.table[queue.lp]
        partition_queue = queue.partition_queue
        partition_queue.ready.append(queue)
        queue.queued = True
        if not partition_queue.listed:
            partition_queue.listed = True
            partition_queue.sender.partition_queues.append(partition_queue)

    # What answers mean

    def stored(self, batch: AppendBatch, offset: int, replicas: int | None) -> list[Listener]:
        """Every message of a batch was appended, the first one at `offset`."""
        outcome = self._outcome_of(batch, replicas)
        listeners: list[Listener] = []
        if not isinstance(outcome, Appended) or (self._blocked and self._is_blocked(batch)):
            for pending in batch.pending_sends:
                listeners += self._stored_send(pending, offset, 0, outcome, replicas, batch.partition_queue)
                offset += pending.count
            self._clear_refusal(batch.partition_queue)
            return listeners
        # The common case, written out: it runs for every message.
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
        """The runs of a batch fared differently."""
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
        """Send nothing behind the messages of a batch, which have dedup ids, before its answer has come."""
        for pending in batch.pending_sends:
            self._note_block(pending.queue, "once")

    def each(self, batch: AppendBatch, outcomes: Sequence[OnceOutcome], replicas: int | None) -> list[Listener]:
        """The messages of a batch, all with dedup ids, fared differently."""
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
        """Nothing of a batch was stored, and nothing can be for a while."""
        partition_queue = batch.partition_queue
        partition_queue.refusals += 1
        partition_queue.refusal = error
        partition_queue.retry_at = now + backoff_s(partition_queue.refusals)
        if partition_queue.refusals == 1:
            log.warning("publish_refused", extra={"partition": partition_queue.partition, "reason": str(error)})
        self.repeat(batch)
        listeners: list[Listener] = []
        if isinstance(error, BacklogFull):
            # It may have been raised since.
            for topic in {queue.topic for queue in batch.queues()}:
                self.background.refresh_limits(topic)
        self.divert([partition_queue], now)
        for queue in list(partition_queue.ready):
            listeners += self.expire(queue, now)
        return listeners

    def repeat(self, batch: AppendBatch) -> None:
        """Nothing of a batch was stored; it is to be sent again."""
        for queue in batch.queues():
            self._block(queue, "repeat")

    def misrouted(self, batch: AppendBatch) -> None:
        """Nothing of a batch was stored: its partition is not open on this node."""
        for queue in batch.queues():
            self._block(queue, "route")

    def unknown(self, batches: Iterable[AppendBatch]) -> None:
        """Nobody knows what became of these batches, all that flew on one line: they are to be sent again."""
        for queue in dict.fromkeys(queue for batch in batches for queue in batch.queues()):
            queue.note_uncertain()
            self._block(queue, "repeat")

    def resolve(self, queues: Iterable[LpQueue], now: float) -> list[Listener]:
        """Act on the trouble of queues about which no more answers will come."""
        listeners: list[Listener] = []
        for queue in queues:
            blocked_by = queue.blocked_by
            if blocked_by is None:
                continue
            queue.requeue()
            if blocked_by == "lost":
                listeners += self._lose(queue)
            elif not queue.waiting:
                # What was refused turned out to be stored.
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
        """A pending send of which an earlier try had stored messages: where they are."""
        if pending not in self.searched:
            return []
        del self.searched[pending]
        return self._finish(pending, outcome)

    # What nodes lost

    def expected_marks(self, sender: NodeSender) -> list[AcknowledgedMark]:
        """Return what partitions on a node have to hold: where each LP is sent, and where it was sent last.

        Under the source that a queue has now, and under those that it left.
        """
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
        """Act on a mark that was read, after the claim was made, from the run of the node that is armed.

        What is behind lost messages can't be stored any more: the chain refuses it.
        """
        queue = expected.queue
        if mark >= expected.acked:
            return []
        if queue.source != expected.source:
            return self._lose_former(expected, mark)
        self._note_lost(queue, mark)
        # Of what flies answers come, and more of it may be lost with them.
        return [] if queue.in_flight else self.resolve([queue], 0.0)

    def raise_losses(self) -> None:
        """Raise AcknowledgedLoss with all that was lost and that nobody was told of as yet; call without the lock."""
        with self.lock:
            losses = tuple(self.unreported_losses)
            self.unreported_losses.clear()
        if losses:
            raise AcknowledgedLoss(*losses[0], losses[1:])

    # Best effort

    def divert(self, partition_queues: Iterable[PartitionQueue], now: float) -> None:
        """Have what waits for partitions that don't take it go elsewhere, where its topic says that it may."""
        for partition_queue in partition_queues:
            for queue in list(partition_queue.ready):
                self._divert(queue, now)

    def _divert(self, queue: LpQueue, now: float) -> None:
        """Send what certainly is not stored to another partition, marked; nothing, where order counts or none is free.

        What may be stored stays: sent elsewhere too, it might be there twice.
        """
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
        """Fail what waits in a queue of a refusing partition and whose time is over."""
        refusal = queue.partition_queue.refusal
        index = queue.first_expired(now, full=isinstance(refusal, BacklogFull)) if refusal is not None else None
        if refusal is None or index is None:
            return []
        return self._fail(queue, index, refusal)

    def refuse_eager(self, pending: PendingSend, now: float) -> list[Listener]:
        """Fail a pending send that was just queued, if it does not wait for a partition that was at its limit just
        now."""
        partition_queue = pending.queue.partition_queue
        if not pending.eager or now >= partition_queue.retry_at or not isinstance(partition_queue.refusal, BacklogFull):
            return []
        return self.expire(pending.queue, now)

    def withdraw(self, pending: PendingSend) -> bool:
        """Take a pending send back whose partition refuses it and that certainly is not stored; say whether it was.

        What is behind it goes on. Where nothing refuses it, it is as good as sent.
        """
        with self.lock:
            queue = pending.queue
            if pending.outcome is not None or queue.partition_queue.refusal is None or not queue.remove(pending):
                return False
            self.counts["withdrawn"] += pending.count
            pending.listener = None
            self._finish(pending, PublishAborted(queue.topic.name, queue.lp, "it was withdrawn"))
            return True

    def abandon(self, pending: PendingSend, now: float) -> list[Listener]:
        """Fail a pending send whose time is over, if it certainly is not stored and its partition refuses; else
        nothing."""
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
        """Fail everything that waits for these partitions and certainly is not stored."""
        listeners: list[Listener] = []
        for partition_queue in partition_queues:
            for queue in list(partition_queue.ready):
                index = next((i for i, p in enumerate(queue.waiting) if p.first > queue.uncertain_to), None)
                if index is not None and queue.blocked_by is None:
                    listeners += self._fail(queue, index, error)
        return listeners

    def fail_remaining(self) -> list[Listener]:
        """Give up everything that is left, when the producer closes."""
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
        """Go on under a new incarnation in the queues that have none."""
        self.source = source
        for queue in self._all_queues():
            if queue.source is None:
                queue.source = source
                self.enqueue(queue)

    def release(self, topic: TopicQueues) -> None:
        """Send again what waited for a newer route."""
        stranded, topic.waiting_for_route = list(topic.waiting_for_route), {}
        for queue in stranded:
            self._unblock(queue)
            self.enqueue(queue)

    def stats(self) -> ProducerStats:
        """Return the counts so far."""
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
        """Settle a pending send of which the first `early` messages were there before."""
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
        """Settle a message that an earlier try had stored: where it is, its dedup id tells, if that is known."""
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
        """Settle a message whose dedup id another message had: nothing was stored, and its number is free again.

        Unless a try of it had no answer: that one may be worked off at any later time, when the id is forgotten, and
        would then take the number that the next message was given. So the queue goes on under a new incarnation.
        """
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
        """Take a pending send from what flies, and settle what flew in front of it."""
        queue = pending.queue
        listeners: list[Listener] = []
        while queue.in_flight[0] is not pending:
            # It was refused in this try. The chain accepted what is behind it, so an earlier try had stored it.
            ahead = queue.in_flight[0]
            listeners += self._stored_send(ahead, 0, ahead.count, outcome, replicas, partition_queue)
        queue.in_flight.popleft()
        return listeners

    def _not_appended(self, queue: LpQueue, status: str, mark: int) -> None:
        """Nothing of a run was stored."""
        if status == "unowned":
            self._block(queue, "route")
        elif mark < queue.acked:
            self._note_lost(queue, mark)
        else:
            # Overtaken: something before it was refused.
            self._block(queue, "repeat")

    def _block(self, queue: LpQueue, blocked_by: BlockReason) -> None:
        """Note a trouble where nothing but a message with a dedup id holds the queue up."""
        if queue.blocked_by in (None, "once"):
            self._note_block(queue, blocked_by)

    def _note_block(self, queue: LpQueue, blocked_by: BlockReason) -> None:
        queue.blocked_by = blocked_by
        self._blocked.add(queue)

    def _note_lost(self, queue: LpQueue, mark: int) -> None:
        """Note that what is behind a mark is gone; of the marks of two partitions the lower one counts."""
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
        """Fail what waits, and go on under a new incarnation.

        The lost seqs must not be given to other messages: groups may have handled the lost ones, and would take the
        new ones for repetitions of them.
        """
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
        """Tell of what is missing of a source that a queue left: nothing waits under it, so the queue goes on."""
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
    """Whether this thread runs the application's callbacks."""

    now = False


_callback = _CallbackState()


def notify_all(listeners: Sequence[Listener]) -> None:
    """Tell listeners; not under the lock, because it runs the application's callbacks."""
    if not listeners:
        return
    before, _callback.now = _callback.now, True
    try:
        for listener in listeners:
            listener.notify()
    finally:
        _callback.now = before


def in_callback() -> bool:
    """Say whether this is called by a future's callback: it must not wait then, others wait for this very thread."""
    return _callback.now


def _copy(error: MqlayerError) -> MqlayerError:
    """Return an error of its own: two threads must not raise one object."""
    return type(error)(*error.args)
