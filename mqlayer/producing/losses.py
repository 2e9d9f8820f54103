"""What a producer knows to be stored, and whom it tells that it is lost. No I/O."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from mqlayer.errors import Loss
from mqlayer.events import Event, tell
from mqlayer.producing.parcels import Listener

if TYPE_CHECKING:
    from mqlayer.producing.lanes import Lane

log = logging.getLogger(__name__)


class Claim(NamedTuple):
    """A partition has to hold all messages of a source in a lane's LP up to `acked`: they were acknowledged."""

    lane: Lane
    source: int
    acked: int
    partition: int


class FormerSources:
    """Up to where lanes were acknowledged under sources that they left, and nobody was told that it is lost.

    Nobody continues those chains, so no answer tells that they are short: looks do. At most `limit` are kept: of the
    oldest nobody hears then, but for the log.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._acked: dict[tuple[Lane, int], int] = {}

    def __iter__(self) -> Iterator[tuple[Lane, int, int]]:
        """Yield each lane with a source that it left, and up to where that was acknowledged; the oldest first."""
        for (lane, source), acked in self._acked.items():
            yield lane, source, acked

    def add(self, lane: Lane, acked: int) -> None:
        """Keep what was acknowledged under the source that a lane is about to leave."""
        if lane.source is None or not acked:
            return
        self._acked[lane, lane.source] = acked
        if len(self._acked) > self._limit:
            oldest = next(iter(self._acked))
            facts = {"topic": oldest[0].topic.name, "lp": oldest[0].lp, "source": oldest[1]}
            log.warning("former_source_forgotten", extra=facts | {"messages": self._acked.pop(oldest)})

    def lower(self, lane: Lane, source: int, mark: int) -> int:
        """Keep nothing behind a mark any more; return up to where it was acknowledged, 0 for nothing kept."""
        acked = self._acked.get((lane, source), 0)
        if mark < acked:
            if mark:
                self._acked[lane, source] = mark
            else:
                del self._acked[lane, source]
        return acked


class LossNews(Listener):
    """Tells the hooks of this process what was lost."""

    __slots__ = ("_event",)

    def __init__(self, loss: Loss, partition: int) -> None:
        super().__init__(0)
        self._event = Event(
            "acknowledged_lost", loss.topic, "", partition, loss.lp, loss.first, cause=loss.where, count=loss.messages
        )

    def tell(self) -> None:
        """Call the hooks."""
        tell(self._event)
