"""How a producer publishes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from mqlayer.arguments import check_fields
from mqlayer.errors import InvalidInput
from mqlayer.settings import Settings

REPLICA_TIMEOUT_S: Final = 1.0

OnBacklog = Literal["wait", "error"]
"""At a full partition: wait until the message's deadline, or fail at once."""


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """Options of one producer.

    - `replicas`: replicas to wait for per append; receipts tell how many have it.
    - `require_replicas`: too few raise NotReplicated; the message is stored.
    - `replica_timeout_s`: how long to wait for them, default 1.
    - `max_pending_messages`, `max_pending_bytes`: bounds of unsettled messages.
    - `max_in_flight`: unanswered appends per connection, 1 to 16.
    - `on_backlog`: at a full partition, "wait" or "error".
    """

    replicas: int = 0
    require_replicas: bool = False
    replica_timeout_s: float | None = None
    max_pending_messages: int = 100_000
    max_pending_bytes: int = 64_000_000
    max_in_flight: int = 3
    on_backlog: OnBacklog = "wait"

    def __post_init__(self) -> None:
        """Raises InvalidInput for another type."""
        check_fields(self)

    @property
    def required_replicas(self) -> int:
        """How many replicas a stored message needs."""
        return self.replicas if self.require_replicas else 0

    @property
    def wait_ms(self) -> int:
        """How long to wait for replicas."""
        timeout_s = REPLICA_TIMEOUT_S if self.replica_timeout_s is None else self.replica_timeout_s
        return max(1, int(timeout_s * 1000))

    def check(self, settings: Settings) -> None:
        """Raise InvalidInput for options without effect or out of bounds."""
        if self.replicas == 0 and (self.require_replicas or self.replica_timeout_s is not None):
            raise InvalidInput(
                "without replicas to wait for there is nothing to require or time: say how many replicas, or leave "
                "require_replicas and replica_timeout_s out"
            )
        timeout_s = REPLICA_TIMEOUT_S if self.replica_timeout_s is None else self.replica_timeout_s
        if self.replicas < 0 or not 1 <= self.max_in_flight <= 16 or not 0 < timeout_s < settings.socket_timeout_s:
            raise InvalidInput("replicas: 0 or more; max_in_flight: 1 to 16; replica_timeout_s: below socket_timeout_s")
        if min(self.max_pending_messages, self.max_pending_bytes) < 1:
            raise InvalidInput("max_pending_messages and max_pending_bytes are 1 or more")
        self.is_eager(None)

    def is_eager(self, on_backlog: OnBacklog | None) -> bool:
        """Whether messages fail at once at a full partition. Raises InvalidInput."""
        choice = self.on_backlog if on_backlog is None else on_backlog
        if choice not in ("wait", "error"):
            raise InvalidInput(f"at a full partition a message can wait, or be an error, not {choice!r}")
        return choice == "error"
