"""What handlers raised."""

from __future__ import annotations

from dataclasses import dataclass

from mqlayer.consuming.engine.failure_actions import FailureAction
from mqlayer.errors import HandlerControl
from mqlayer.testing.messages import PublishedMessage


@dataclass(frozen=True, slots=True)
class Failure:
    """A handler's exception. `action`: what followed, where it is known: RetryInPlace, ParkKey or DeadLetter."""

    topic: str
    group: str
    message: PublishedMessage
    error: BaseException
    attempt: int
    action: FailureAction | None = None

    @property
    def wanted(self) -> bool:
        """Whether the handler decided it: RetryLater, Reject, Skip or PauseKey."""
        return isinstance(self.error, HandlerControl)
