"""How fast a group may begin messages, and what of that one partition has."""

from __future__ import annotations

from typing import Final, NamedTuple, Self

from mqlayer.errors import InvalidInput

LEAST_PER_S: Final = 0.0001
BUCKET_S: Final = 0.25
"""What members fetch at a time of a rate at most, in seconds of it."""


class RateShare(NamedTuple):
    """What a bucket gives: `per_s` messages by the second, `size` at once after a rest, `first` where it is new."""

    per_s: float
    size: float
    first: float


class RateLimit(NamedTuple):
    """A group's limit: `per_s` messages by the second, up to `burst` at once after a rest, over `partitions`."""

    per_s: float
    burst: float
    partitions: int = 1

    @classmethod
    def of(cls, per_s: float | None, burst: float | None, partitions: int = 1) -> Self | None:
        """Return the limit that settings say, None for none.

        Without a burst it is what a second gives; it is what KEPT_S gives at the least, and never below a message.
        """
        if per_s is None:
            return None
        return cls(per_s, max(1.0, per_s * BUCKET_S, per_s if burst is None else burst), max(1, partitions))

    @property
    def share(self) -> RateShare:
        """What one partition has of it, where parts of messages can be put together (members)."""
        count = self.partitions
        return RateShare(self.per_s / count, self.burst / count, 1.0 / count)

    @property
    def whole_share(self) -> RateShare:
        """What one partition has of it by itself: whole messages (ordered pop)."""
        count = self.partitions
        return RateShare(self.per_s / count, max(1.0, self.burst / count), 1.0)


def check_rate(per_s: float | None, burst: float | None) -> None:
    """Raise InvalidInput for a rate that no group can have; without end, `math.inf`, means no limit."""
    if per_s is not None and not per_s >= LEAST_PER_S:
        raise InvalidInput(f"a rate is {LEAST_PER_S} messages/s or more, not {per_s}: to stop a group, pause it")
    if burst is not None and not burst >= 1:
        raise InvalidInput(f"a burst is 1 message or more, not {burst}")
