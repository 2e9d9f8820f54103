"""What a producer knows to be stored, and whom it tells that it is lost. No I/O."""

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
    """A partition has to hold all messages of a source in a queue's LP up to `acked`: they were acknowledged."""

    queue: LpQueue
    source: int
    acked: int
    partition: int


class FormerSources:
    """Up to where queues were acknowledged under sources that they left, and nobody was told that it is lost.

    Nobody continues those chains, so no answer tells that they are short: looks do. At most `limit` are kept: of the
    oldest nobody hears then, but for the log.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._acked: dict[tuple[LpQueue, int], int] = {}

    def __iter__(self) -> Iterator[tuple[LpQueue, int, int]]:
        """Yield each queue with a source that it left, and up to where that was acknowledged; the oldest first."""
        for (queue, source), acked in self._acked.items():
            yield queue, source, acked

    def add(self, queue: LpQueue, acked: int) -> None:
        """Keep what was acknowledged under the source that a queue is about to leave."""
        if queue.source is None or not acked:
            return
        self._acked[queue, queue.source] = acked
        if len(self._acked) > self._limit:
            oldest = next(iter(self._acked))
            facts = {"topic": oldest[0].topic.name, "lp": oldest[0].lp, "source": oldest[1]}
            log.warning("former_source_forgotten", extra=facts | {"messages": self._acked.pop(oldest)})

    def lower(self, queue: LpQueue, source: int, mark: int) -> int:
        """Keep nothing behind a mark any more; return up to where it was acknowledged, 0 for nothing kept."""
        acked = self._acked.get((queue, source), 0)
        if mark < acked:
            if mark:
                self._acked[queue, source] = mark
            else:
                del self._acked[queue, source]
        return acked


class LossListener(Listener):
    """Tells the hooks of this process what was lost."""

    __slots__ = ("_event",)

    def __init__(self, loss: Loss, partition: int) -> None:
        super().__init__(0)
        self._event = Event(
            "acknowledged_loss", loss.topic, "", partition, loss.lp, loss.first, cause=loss.where, count=loss.messages
        )

    def notify(self) -> None:
        """Call the hooks."""
        emit(self._event)
