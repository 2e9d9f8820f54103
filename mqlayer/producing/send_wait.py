"""Wait in a thread for settled messages."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mqlayer.producing.guarded_in_flight import GuardedInFlight
from mqlayer.producing.listeners import ThreadListener
from mqlayer.producing.receipts import Receipts, partly_published, unknown_outcome
from mqlayer.producing.send_queues import PendingSend


def await_one(guarded: GuardedInFlight, pending: PendingSend, deadline: float) -> None:
    """Wait for a pending send without a listener. Raises PublishUnknown at the deadline."""
    future = guarded.future(pending)
    if future is None:
        return
    try:
        future.exception(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        guarded.abandon([pending])
        if pending.outcome is None:
            raise unknown_outcome(pending, future=future) from None


def await_all(
    guarded: GuardedInFlight, listener: ThreadListener, topic: str, owners: Sequence[PendingSend], deadline: float
) -> Receipts:
    """Wait for a batch until the deadline; return its receipts. Raises PartlyPublished."""
    if listener.remaining:
        try:
            listener.done.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            guarded.abandon(owners)
    if listener.all_stored:
        return Receipts(owners)
    raise partly_published(topic, owners)
