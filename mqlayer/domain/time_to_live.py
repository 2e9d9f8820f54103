"""How long after its publishing a message may be given to a handler: `docs/design/time-to-live.md`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from mqlayer.arguments import explain
from mqlayer.domain.message import HEADERS_MARK, TTL_HEADER, TTL_MARK, ParkedRecord, Record
from mqlayer.errors import InvalidInput

ExpiredRule = Literal["settle", "dead"]
"""An expired message is settled, and counted; or it becomes a dead message."""

EXPIRED_REASON: Final = "its time to live ended"


LONGEST_S: Final = 3_153_600_000


@explain
def expires_after(seconds: float) -> dict[str, str]:
    """Return the header of a message that no handler or receiver is given later than `seconds` after its publishing.

    A topic's time to live counts too, where it is shorter. Raises InvalidInput below a millisecond, above 100 years.
    """
    if not 0.001 <= seconds <= LONGEST_S:
        raise InvalidInput(f"a message lives for 0.001 to {LONGEST_S} seconds, not {seconds}")
    return {TTL_HEADER: f"{max(1, round(seconds * 1000))}"}


@dataclass(frozen=True, slots=True)
class TimeToLive:
    """A topic's rule. `ttl_s`: 0 for no end but a message's own."""

    ttl_s: int = 0
    expired: ExpiredRule = "settle"

    def judged_by(self, now_ms: int, now: float) -> Expiry:
        """Return the judgement of messages.

        `now_ms`: the database's time, at the latest; `now`: this process's clock in seconds, thereafter.
        """
        return Expiry(self.ttl_s * 1000, self.expired, now_ms - now * 1000)


NO_END: Final = TimeToLive()


@dataclass(frozen=True, slots=True)
class Expiry:
    """Judges messages. `ahead_ms`: the database's time as this process's clock began, at the latest.

    Never ahead of the database's clock, so who judges later calls no message younger.
    """

    ttl_ms: int
    rule: ExpiredRule
    ahead_ms: float

    def may_have_ended(self, records: Sequence[Record]) -> bool:
        """Whether any message has a time to live: its own is in its headers."""
        return self.ttl_ms > 0 or any(HEADERS_MARK in record[1] for record in records)

    def has_ended(self, record: Record, now: float) -> bool:
        """Whether a message's time is over; never of one that an operator gave back or replays."""
        ttl_ms = self.ttl_ms
        # Asked of every message: most have neither.
        if TTL_MARK in record[1]:
            own_ms = record.ttl_ms
            ttl_ms = min(ttl_ms or own_ms, own_ms) if own_ms else ttl_ms
        if not ttl_ms or (isinstance(record, ParkedRecord) and (record.redriven or record.replay is not None)):
            return False
        return record.at_ms + ttl_ms <= self.ahead_ms + now * 1000

    def count_ended(self, records: Sequence[Record], now: float) -> int:
        """Return how many of the first records are over."""
        return next((at for at, record in enumerate(records) if not self.has_ended(record, now)), len(records))
