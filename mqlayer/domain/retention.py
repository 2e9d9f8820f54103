"""How long a topic's streams keep records, and its messages live."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal

from mqlayer.domain.time_to_live import LONGEST_S, ExpiredRule
from mqlayer.errors import InvalidInput

UnsettledRule = Literal["keep", "drop"]
"""`drop`: limits bind also records that a group has not settled."""

MOST: Final = 1_000_000_000_000_000


@dataclass(frozen=True, slots=True)
class Retention:
    """Limits per partition: seconds since publishing, bytes in Redis, records; 0: none. Any that is passed suffices.

    `message_ttl_s`, `expired`: see `TimeToLive`.
    """

    retain_s: int = 0
    retain_bytes: int = 0
    retain_messages: int = 0
    retain_unsettled: UnsettledRule = "keep"
    message_ttl_s: int = 0
    expired: ExpiredRule = "settle"

    @property
    def limited(self) -> bool:
        """Whether a limit is set."""
        return max(self.retain_s, self.retain_bytes, self.retain_messages) > 0

    @property
    def drops(self) -> bool:
        """Whether unsettled records go too."""
        return self.limited and self.retain_unsettled == "drop"

    def check(self) -> None:
        """Raise InvalidInput for what no topic can have."""
        if not 0 <= self.retain_s <= LONGEST_S:
            raise InvalidInput(f"records are kept for 0 (no limit) to {LONGEST_S} seconds, not {self.retain_s}")
        for name, value in (("bytes", self.retain_bytes), ("messages", self.retain_messages)):
            if not 0 <= value <= MOST:
                raise InvalidInput(f"a partition keeps 0 (no limit) to {MOST} {name}, not {value}")
        if self.retain_unsettled not in ("keep", "drop"):
            raise InvalidInput(
                f"unsettled records are kept or dropped: say keep or drop, not {self.retain_unsettled!r}"
            )
        if self.retain_unsettled == "drop" and not self.limited:
            raise InvalidInput("unsettled records are dropped beyond a limit: set an age, bytes or messages too")
        if not 0 <= self.message_ttl_s <= LONGEST_S:
            raise InvalidInput(f"messages live for 0 (no end) to {LONGEST_S} seconds, not {self.message_ttl_s}")
        if self.expired not in ("settle", "dead"):
            raise InvalidInput(f"expired messages are settled or die: say settle or dead, not {self.expired!r}")


RETENTION_FIELDS: Final = len(fields(Retention))
"""How many columns a topic's row has of it."""
