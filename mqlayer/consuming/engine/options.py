"""A member's bounds and counts."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass

from mqlayer.arguments import check_fields
from mqlayer.randomness import RNG


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """Bounds of one member. Counts are messages, durations seconds.

    - `concurrency`: handlers at once, each of another key.
    - `prefetch_count`, `prefetch_bytes`: read and unsettled, over all partitions; bytes are estimated, one read may
      exceed them.
    - `drain_timeout_s`: how long a hand-over or stop waits for handlers.
    - `parked_keys`: parked keys per partition, where below the group's limit.
    - `extend_limit_s`: shared groups only; handler time after which other members get its message too.
    """

    concurrency: int = 8
    prefetch_count: int = 4_000
    prefetch_bytes: int = 32 * 1024 * 1024
    drain_timeout_s: float = 30.0
    parked_keys: int | None = None
    extend_limit_s: float = 3_600.0
    member_id: str = ""

    def __post_init__(self) -> None:
        """Raises InvalidInput for another type."""
        check_fields(self)


@dataclass(slots=True)
class MemberStats:
    """Counts since the start; any thread may read them; exact after the stop."""

    handled: int = 0
    settled: int = 0
    failed: int = 0
    fenced: int = 0
    parked: int = 0
    unparked: int = 0
    dead: int = 0
    skipped: int = 0
    unmatched: int = 0
    timed_out: int = 0
    paused: int = 0
    blocked: int = 0
    parking_full: int = 0
    leases_lost: int = 0
    held: int = 0
    expired: int = 0


def new_member_id() -> str:
    """Return host, pid and a random part as a name."""
    host = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower()).strip("-") or "host"
    return f"m-{host[:32]}-{os.getpid()}-{RNG.randrange(16**6):06x}"
