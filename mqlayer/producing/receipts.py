"""Receipts made of outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, overload

from mqlayer.domain.message import Identity
from mqlayer.errors import MqlayerError, PartlyPublished, PublishUnknown
from mqlayer.producing.outcomes import Appended, Duplicate, Recovered
from mqlayer.producing.send_queues import LpQueue, PendingSend


class Receipt(NamedTuple):
    """A stored message's place.

    `offset` is None if an earlier try stored it, and it is not among the partition's last 5,000. `replicas`: how many
    have it, if the producer waits for them.
    """

    topic: str
    partition: int
    offset: int | None
    identity: Identity
    replicas: int | None = None
    duplicate: bool = False
    """Nothing was stored: an earlier message with the dedup id is there."""


class Receipts(Sequence[Receipt]):
    """A batch's receipts in message order, made on access."""

    __slots__ = ("_indices", "_owners")

    def __init__(self, owners: Sequence[PendingSend]) -> None:
        self._owners = owners
        self._indices: list[int] = []

    def __len__(self) -> int:
        return len(self._owners)

    @overload
    def __getitem__(self, position: int) -> Receipt: ...

    @overload
    def __getitem__(self, position: slice) -> list[Receipt]: ...

    def __getitem__(self, position: int | slice) -> Receipt | list[Receipt]:
        if not self._indices:
            self._indices = _indices_within(self._owners)
        if isinstance(position, slice):
            return [
                receipt_of(pending, index)
                for pending, index in zip(self._owners[position], self._indices[position], strict=True)
            ]
        return receipt_of(self._owners[position], self._indices[position])

    def __repr__(self) -> str:
        return f"<{len(self)} receipts>"


def receipt_of(pending: PendingSend, index: int = 0) -> Receipt:
    """Return a message's receipt, or raise its error."""
    outcome, queue = pending.outcome, pending.queue
    if isinstance(outcome, Appended):
        identity = Identity(outcome.source, queue.lp, pending.first + index)
        return Receipt(queue.topic.name, outcome.partition, pending.offset + index, identity, outcome.replicas)
    if isinstance(outcome, Recovered):
        partition, offset = outcome.positions[index]
        identity = Identity(outcome.source, queue.lp, pending.first + index)
        return Receipt(queue.topic.name, partition, offset, identity, outcome.replicas)
    if isinstance(outcome, Duplicate):
        topic = queue.topic.name
        return Receipt(topic, outcome.partition, outcome.offset, outcome.identity, outcome.replicas, duplicate=True)
    if outcome is None:
        raise RuntimeError("the pending send is not settled yet")
    raise outcome


def unknown_outcome(pending: PendingSend, index: int = 0, future: Future[Receipt] | None = None) -> PublishUnknown:
    """Return an unsettled message's error; its future reports the outcome."""
    queue = pending.queue
    error = PublishUnknown(queue.topic.name, queue.lp, pending.first + index, _reason(queue))
    error.future = future
    return error


def partly_published(topic: str, owners: Sequence[PendingSend]) -> PartlyPublished:
    """Return the error for a batch without all receipts."""
    outcomes = [_outcome_of(pending, index) for pending, index in zip(owners, _indices_within(owners), strict=True)]
    errors = [outcome for outcome in outcomes if isinstance(outcome, MqlayerError)]
    partly = PartlyPublished(topic, len(outcomes) - len(errors), len(errors), str(errors[0]) if errors else "")
    partly.outcomes = outcomes
    partly.__cause__ = errors[0] if errors else None
    return partly


def _outcome_of(pending: PendingSend, index: int) -> Receipt | MqlayerError:
    if pending.outcome is None:
        return unknown_outcome(pending, index)
    return pending.outcome if isinstance(pending.outcome, MqlayerError) else receipt_of(pending, index)


def _indices_within(owners: Sequence[PendingSend]) -> list[int]:
    seen: dict[PendingSend, int] = {}
    indices = []
    for pending in owners:
        index = seen.get(pending, 0)
        indices.append(index)
        seen[pending] = index + 1
    return indices


def _reason(queue: LpQueue) -> str:
    partition_queue = queue.partition_queue
    if queue.blocked_by == "route":
        return f"partition {partition_queue.partition} does not serve the LP at present, and no newer route is known"
    if partition_queue.refusal is not None:
        return str(partition_queue.refusal)
    return partition_queue.lack or partition_queue.node.last_error or "no answer in time"
