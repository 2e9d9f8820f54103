"""Waiting for messages to be settled."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mqlayer.errors import PublishUnknown
from mqlayer.producing.in_flight import InFlight, notify_all
from mqlayer.producing.pending_send import BatchListener, PendingSend, ReceiptPromise
from mqlayer.producing.send_queues import LpQueue


def await_one(in_flight: InFlight, pending: PendingSend, deadline: float) -> None:
    """Wait for a pending send without a listener. Raises PublishUnknown at the deadline."""
    with in_flight.lock:
        if pending.outcome is not None:
            return
        promise = ReceiptPromise(in_flight.withdraw)
        pending.listener, promise.pending = promise, pending
        pending.queue.partition_queue.sender.wake_locked()
    try:
        promise.future.exception(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        _abandon(in_flight, [pending])
        if pending.outcome is None:
            raise unknown_outcome(pending) from None


def await_all(
    in_flight: InFlight, listener: BatchListener, pending_sends: Sequence[PendingSend], deadline: float
) -> None:
    """Wait for a batch, until the deadline."""
    try:
        listener.done.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        _abandon(in_flight, pending_sends)


def unknown_outcome(pending: PendingSend, index: int = 0) -> PublishUnknown:
    """Return the error for an unsettled message."""
    queue = pending.queue
    error = PublishUnknown(queue.topic.name, queue.lp, pending.first + index, _reason(queue))
    if isinstance(pending.listener, ReceiptPromise):
        error.future = pending.listener.future
    return error


def _reason(queue: LpQueue) -> str:
    partition_queue = queue.partition_queue
    if queue.blocked_by == "route":
        return f"partition {partition_queue.partition} does not serve the LP at present, and no newer route is known"
    if partition_queue.refusal is not None:
        return str(partition_queue.refusal)
    return partition_queue.sender.last_error or "no answer in time"


def _abandon(in_flight: InFlight, pending_sends: Sequence[PendingSend]) -> None:
    now = time.monotonic()
    listeners = []
    with in_flight.lock:
        for pending in dict.fromkeys(pending_sends):
            if pending.outcome is None:
                listeners += in_flight.abandon(pending, now)
    notify_all(listeners)
