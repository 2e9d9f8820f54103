"""The periodic jobs and their intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LATE_AFTER_INTERVALS: Final = 3
LATE_AFTER_AT_LEAST_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class PeriodicJob:
    """A periodic job."""

    name: str
    every_s: float

    @property
    def late_after_s(self) -> float:
        """Seconds without a run that mean a missing worker, beat or broker."""
        return max(LATE_AFTER_INTERVALS * self.every_s, LATE_AFTER_AT_LEAST_S)


RELAY: Final = PeriodicJob("relay", 10)
TRIM: Final = PeriodicJob("trim", 10)
ROTATE_OUTBOX: Final = PeriodicJob("rotate_outbox", 60)
CLEAN_FENCE: Final = PeriodicJob("clean_fence", 300)
CLEAN_MARKS: Final = PeriodicJob("clean_marks", 300)
REPAIR_ROUTES: Final = PeriodicJob("repair_routes", 2)
REARM_NODES: Final = PeriodicJob("rearm_nodes", 5)
REBALANCE: Final = PeriodicJob("rebalance", 2)
BALANCE_BY_RATE: Final = PeriodicJob("balance_by_rate", 10)
RETRY_SCAN: Final = PeriodicJob("retry_scan", 5)
CLEAN_ATTEMPTS: Final = PeriodicJob("clean_attempts", 300)
ARCHIVE: Final = PeriodicJob("archive", 5)
RETAIN: Final = PeriodicJob("retain", 300)
RELEASE_DELAYED: Final = PeriodicJob("release_delayed", 5)
CLEAN_DEDUP: Final = PeriodicJob("clean_dedup", 60)
CLEAN_INBOX: Final = PeriodicJob("clean_inbox", 300)
WATCH_VERSIONS: Final = PeriodicJob("watch_versions", 10)
RETIRE_GROUPS: Final = PeriodicJob("retire_groups", 10)

JOBS: Final = (
    RELAY,
    TRIM,
    ROTATE_OUTBOX,
    CLEAN_FENCE,
    CLEAN_MARKS,
    REPAIR_ROUTES,
    REARM_NODES,
    REBALANCE,
    BALANCE_BY_RATE,
    RETRY_SCAN,
    CLEAN_ATTEMPTS,
    ARCHIVE,
    RETAIN,
    RELEASE_DELAYED,
    CLEAN_DEDUP,
    CLEAN_INBOX,
    WATCH_VERSIONS,
    RETIRE_GROUPS,
)
