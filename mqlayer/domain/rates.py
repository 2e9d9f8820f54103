"""A group's rate limit, and partitions' shares."""

from __future__ import annotations

from typing import Final, NamedTuple, Self

from mqlayer.errors import InvalidInput

LEAST_PER_S: Final = 0.0001
BUCKET_S: Final = 0.25
"""Most seconds of a rate that members fetch at once."""


class RateShare(NamedTuple):
    """A bucket: messages per second, at once after a pause, and in a new one."""

    per_s: float
    size: float
    first: float


class RateLimit(NamedTuple):
    """A group's limit: `per_s` messages per second, up to `burst` after a pause."""

    per_s: float
    burst: float
    partitions: int = 1

    @classmethod
    def of(cls, per_s: float | None, burst: float | None, partitions: int = 1) -> Self | None:
        """Return the configured limit, None for none.

        The burst defaults to a second's messages, at least one message and BUCKET_S of the rate.
        """
        if per_s is None:
            return None
        return cls(per_s, max(1.0, per_s * BUCKET_S, per_s if burst is None else burst), max(1, partitions))

    @property
    def share(self) -> RateShare:
        """A partition's share for members, who combine fractions."""
        count = self.partitions
        return RateShare(self.per_s / count, self.burst / count, 1.0 / count)

    @property
    def whole_share(self) -> RateShare:
        """A partition's share in whole messages (ordered pop)."""
        count = self.partitions
        return RateShare(self.per_s / count, max(1.0, self.burst / count), 1.0)


def check_rate(per_s: float | None, burst: float | None) -> None:
    """Raise InvalidInput for an invalid limit; `math.inf` means none."""
    if per_s is not None and not per_s >= LEAST_PER_S:
        raise InvalidInput(f"a rate is {LEAST_PER_S} messages/s or more, not {per_s}: to stop a group, pause it")
    if burst is not None and not burst >= 1:
        raise InvalidInput(f"a burst is 1 message or more, not {burst}")
