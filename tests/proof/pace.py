"""How fast messages were handled in a stretch of a run, and how long each waited, by the histories."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tests.proof.history import Deliver, Publish, Record

SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Pace:
    """Messages of one stretch: how many were published and handled in it, and waits of those published, in seconds.

    A wait lasts from the commit to the first end of a handler that did not fail, also where that is behind the stretch.
    """

    seconds: float
    published: int
    handled: int
    median_wait_s: float
    p99_wait_s: float
    longest_wait_s: float

    @property
    def per_s(self) -> float:
        """Messages handled a second."""
        return self.handled / self.seconds

    @property
    def kept_up(self) -> float:
        """What was handled for each message that was published."""
        return self.handled / max(1, self.published)


def pace(records: Iterable[Record], since_ns: int, until_ns: int, *, without: Collection[str]) -> Pace:
    """Return the pace from one time to another (CLOCK_MONOTONIC) of all keys but some."""
    published: dict[tuple[int, int, int], int] = {}
    handled: dict[tuple[int, int, int], int] = {}
    for record in records:
        event = record.event
        if record.phase != "ok" or not isinstance(event, Publish | Deliver) or event.key in without:
            continue
        times = published if isinstance(event, Publish) else handled
        times.setdefault((event.source, event.lp, event.seq), record.at_ns)
    waits = sorted(
        max(0.0, (handled[one] - at) / SECOND_NS)
        for one, at in published.items()
        if since_ns <= at < until_ns and one in handled
    ) or [0.0]
    return Pace(
        seconds=(until_ns - since_ns) / SECOND_NS,
        published=sum(since_ns <= at < until_ns for at in published.values()),
        handled=sum(since_ns <= at < until_ns for at in handled.values()),
        median_wait_s=waits[len(waits) // 2],
        p99_wait_s=waits[int(0.99 * (len(waits) - 1))],
        longest_wait_s=waits[-1],
    )
