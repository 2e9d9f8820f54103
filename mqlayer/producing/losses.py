"""Acknowledged marks and losses. No I/O."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from mqlayer.errors import Loss
from mqlayer.events import Event, emit
from mqlayer.producing.pending_send import Listener

if TYPE_CHECKING:
    from mqlayer.producing.send_queues import LpQueue

log = logging.getLogger(__name__)


class AcknowledgedMark(NamedTuple):
    """The mark that a partition must have."""

    queue: LpQueue
    source: int
    acked: int
    partition: int


class FormerSources:
    """Seqs acknowledged under queues' former sources, less reported losses.

    Nothing continues these chains, so only the loss detector finds losses. Beyond `limit`, the oldest is logged and
    dropped.
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
