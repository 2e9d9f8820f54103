"""The in-flight store for several threads: lock, waits, follow-ups."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from mqlayer.domain.routing import Lp
from mqlayer.errors import AcknowledgedLoss, ProducerClosed, ProducerFull
from mqlayer.producing.append_answers import AppendAnswer
from mqlayer.producing.append_batch import AppendBatch, next_batch
from mqlayer.producing.follow_ups import ProducerJob
from mqlayer.producing.in_flight import InFlight
from mqlayer.producing.listeners import ReceiptFuture, callback, notify_all
from mqlayer.producing.send_queues import Listener, NodeQueue, PendingSend, TopicQueues

CLOSED: Final = "it is closed"
ROOM_TIMEOUT_S: Final = 5.0
"""A thread's message waits this long for room, within its own time."""


class GuardedInFlight:
    """Lends the in-flight store to one thread at a time: `with guarded as in_flight`.

    Leaving wakes senders, schedules jobs, then notifies listeners without the lock.
    """

    def __init__(self, in_flight: InFlight, schedule: Callable[[ProducerJob], None]) -> None:
        self.closed, self.closed_because = False, CLOSED
        self.on_freed: Callable[[], None] | None = None
        """Called with the lock held when something was settled."""
        self._in_flight, self._schedule, self._offer = in_flight, schedule, in_flight.queues.offer
        self._follow_ups, self._capacity, self._losses = in_flight.follow_ups, in_flight.capacity, in_flight.losses
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        self._wake: dict[NodeQueue, Callable[[], None]] = {}

    def __enter__(self) -> InFlight:
        self._lock.acquire()
        return self._in_flight

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """End a loan: pass the follow-ups on, release the lock, then notify listeners."""
        follow_ups = self._follow_ups
        if not (follow_ups.nodes or follow_ups.jobs or follow_ups.listeners or self._capacity.freed):
            self._lock.release()
            return
        listeners: Sequence[Listener] = ()
        try:
            if follow_ups.nodes or follow_ups.jobs:
                self._ask_others()
            if self._capacity.freed:
                self._capacity.freed = False
                if self._waiting:
                    self._changed.notify_all()
                if self.on_freed is not None:
                    self.on_freed()
            if follow_ups.listeners:
                listeners = follow_ups.take_listeners()
        finally:
            self._lock.release()
        if listeners:
            notify_all(listeners)

    def add_node(self, node: NodeQueue, wake: Callable[[], None]) -> None:
        """Have `wake` called, with the lock held, when a node has work."""
        self._wake[node] = wake

    def has_room(self, count: int, size: int) -> bool:
        """Whether this much fits now."""
        return self._capacity.has_room(count, size)

    def close(self, reason: str = CLOSED) -> None:
        """Accept no more messages; queued ones go on."""
        with self:
            self.closed, self.closed_because = True, self.closed_because if self.closed else reason
            self._changed.notify_all()

    def future(self, pending: PendingSend) -> ReceiptFuture | None:
        """Have a future report a send, and wake its sender; None if it is settled."""
        with self as in_flight:
            if pending.outcome is not None:
                return None
            future = pending.listener = ReceiptFuture(self.withdraw_refused, pending)
            in_flight.wake_for(pending)
        return future

    def withdraw_refused(self, pending: PendingSend) -> bool:
        """Withdraw a refused send certainly not stored; else False."""
        with self as in_flight:
            return (
                pending.outcome is None
                and pending.queue.partition_queue.refusal is not None
                and in_flight.settlement.withdraw(pending)
            )

    def accept(self, topic: TopicQueues, lp: Lp, pending: PendingSend, *, wake: bool) -> None:
        """Queue a send; wait for room. Raises ProducerFull or ProducerClosed."""
        # As `with self` lends it, but cheaper: it runs for every message.
        self._lock.acquire()
        try:
            now = time.monotonic()
            if self.closed or pending.eager or not self._offer(topic, lp, pending, now):
                self.wait_for_room(1, pending.size, min(pending.deadline, now + ROOM_TIMEOUT_S))
                self._in_flight.accept(topic, lp, pending, time.monotonic())
            if wake:
                self._wake[pending.queue.partition_queue.node]()
        finally:
            self.give_back()

    def take_batch(self, node: NodeQueue, unanswered: deque[AppendBatch]) -> AppendBatch | None:
        """Move a node's next due batch to its unanswered ones."""
        with self._lock:
            batch = next_batch(node, time.monotonic())
            if batch is not None:
                if batch.once:
                    self._in_flight.queues.block_behind(batch)
                unanswered.append(batch)
            return batch

    def apply_answer(
        self, node: NodeQueue, unanswered: deque[AppendBatch], answer: AppendAnswer | None, replicas: int | None
    ) -> None:
        """Settle the first of a node's unanswered batches; `answer` None: it did not run."""
        self._lock.acquire()
        try:
            batch = unanswered.popleft()
            self._in_flight.answers.apply(batch, answer, replicas, unanswered, time.monotonic())
            node.failures, node.last_error = 0, ""
        finally:
            self.give_back()

    def abandon(self, pending_sends: Sequence[PendingSend]) -> None:
        """Fail overdue, refused sends certainly not stored."""
        now = time.monotonic()
        with self as in_flight:
            for pending in dict.fromkeys(pending_sends):
                if pending.outcome is None:
                    in_flight.settlement.abandon(pending, now)

    def raise_losses(self) -> None:
        """Raise AcknowledgedLoss if losses are unreported."""
        if not self._losses.unreported:
            return
        with self as in_flight:
            losses = in_flight.losses.take_unreported()
        if losses:
            raise AcknowledgedLoss(*losses)

    # With the store lent

    def wait_for_room(self, count: int, size: int, until: float) -> None:
        """Wait for capacity. Raises ProducerFull (in callbacks at once) or ProducerClosed."""
        capacity, started = self._capacity, time.monotonic()
        while not self.closed and not capacity.has_room(count, size):
            wait_s = until - time.monotonic()
            if wait_s <= 0 or callback.now:
                raise ProducerFull(capacity.count, capacity.size, time.monotonic() - started)
            self._wait(wait_s)
        if self.closed:
            raise ProducerClosed(self.closed_because)

    def wait_until_settled(self, until: float) -> int:
        """Wait until nothing is unsettled, or a monotonic time; return the rest's count."""
        for node in self._wake:
            if node.partition_queues:
                self._wake[node]()
        while self._capacity.count and (wait_s := until - time.monotonic()) > 0:
            self._wait(wait_s)
        return self._capacity.count

    def _wait(self, timeout_s: float) -> None:
        self._waiting += 1
        try:
            self._changed.wait(timeout_s)
        finally:
            self._waiting -= 1

    def _ask_others(self) -> None:
        follow_ups = self._follow_ups
        while follow_ups.nodes:
            self._wake[follow_ups.nodes.popitem()[0]]()
        jobs, follow_ups.jobs = follow_ups.jobs, []
        for job in jobs:
            self._schedule(job)
