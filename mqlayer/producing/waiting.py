"""What a caller does while its messages are not settled."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mqlayer.errors import PublishUnknown
from mqlayer.producing.lanes import Lane
from mqlayer.producing.ledger import Ledger, tell_all
from mqlayer.producing.parcels import Gathering, Parcel, Promise


def await_one(ledger: Ledger, parcel: Parcel, deadline: float) -> None:
    """Return when a parcel that nobody waits for yet is settled. Raises PublishUnknown at the deadline."""
    with ledger.lock:
        if parcel.outcome is not None:
            return
        promise = Promise(ledger.withdraw)
        parcel.listener, promise.parcel = promise, parcel
        parcel.lane.slot.link.wake_locked()
    try:
        promise.future.exception(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        _give_up(ledger, [parcel])
        if parcel.outcome is None:
            raise unknown_outcome(parcel) from None


def await_all(ledger: Ledger, gathering: Gathering, parcels: Sequence[Parcel], deadline: float) -> None:
    """Return when all parcels of a batch are settled, or at the deadline."""
    try:
        gathering.done.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        _give_up(ledger, parcels)


def unknown_outcome(parcel: Parcel, index: int = 0) -> PublishUnknown:
    """Return the error for a message of a parcel that is not settled."""
    lane = parcel.lane
    error = PublishUnknown(lane.topic.name, lane.lp, parcel.first + index, _reason(lane))
    if isinstance(parcel.listener, Promise):
        error.future = parcel.listener.future
    return error


def _reason(lane: Lane) -> str:
    slot = lane.slot
    if lane.trouble == "route":
        return f"partition {slot.partition} does not serve the LP at present, and no newer route is known"
    if slot.refusal is not None:
        return str(slot.refusal)
    return slot.link.trouble or "no answer in time"


def _give_up(ledger: Ledger, parcels: Sequence[Parcel]) -> None:
    """Fail those of the parcels that certainly are not stored and are being refused; the others stay queued."""
    now = time.monotonic()
    told = []
    with ledger.lock:
        for parcel in dict.fromkeys(parcels):
            if parcel.outcome is None:
                told += ledger.give_up(parcel, now)
    tell_all(told)
