"""What a producer knows to be stored, and whom it tells that it is lost. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mqlayer.errors import Loss
from mqlayer.events import Event, tell
from mqlayer.producing.parcels import Listener

if TYPE_CHECKING:
    from mqlayer.producing.lanes import Lane


class Claim(NamedTuple):
    """A partition has to hold all messages of a source in a lane's LP up to `acked`: they were acknowledged."""

    lane: Lane
    source: int
    acked: int
    partition: int


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
