"""How long after its publishing a message may be given to a handler: `docs/design/time-to-live.md`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from mqlayer.domain.message import ParkedRecord, Record

ExpiredRule = Literal["settle", "dead"]
"""An expired message is settled, and counted; or it becomes a dead message."""

EXPIRED_REASON: Final = "its time to live ended"


@dataclass(frozen=True, slots=True)
class TimeToLive:
    """A topic's rule. `ttl_s`: 0 for no end."""

    ttl_s: int = 0
    expired: ExpiredRule = "settle"

    def judged_by(self, now_ms: int, now: float) -> Expiry | None:
        """Return the judgement of messages, where there is an end.

        `now_ms`: the database's time, at the latest; `now`: this process's clock in seconds, thereafter.
        """
        return Expiry(self.ttl_s * 1000, self.expired, now_ms - now * 1000) if self.ttl_s else None


NO_END: Final = TimeToLive()


@dataclass(frozen=True, slots=True)
class Expiry:
    """Judges messages. `ahead_ms`: the database's time as this process's clock began, at the latest.

    Never ahead of the database's clock, so who judges later calls no message younger.
    """

    ttl_ms: int
    rule: ExpiredRule
    ahead_ms: float

    def has_ended(self, record: Record, now: float) -> bool:
        """Whether a message's time is over; never of one that an operator gave back or replays."""
        if isinstance(record, ParkedRecord) and (record.redriven or record.replay is not None):
            return False
        return record.at_ms + self.ttl_ms <= self.ahead_ms + now * 1000

    def count_ended(self, records: Sequence[Record], now: float) -> int:
        """Return how many of the first records are over."""
        return next((at for at, record in enumerate(records) if not self.has_ended(record, now)), len(records))
