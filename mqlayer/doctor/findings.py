"""Findings and their limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from mqlayer.errors import MqlayerError, redact
from mqlayer.metrics.alerts import ALERTS


class CheckStatus(StrEnum):
    """A verdict; *unknown*: could not be checked."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report, passwords redacted."""

    check: str
    subject: str
    verdict: CheckStatus
    seen: str
    fix: str = ""

    def __post_init__(self) -> None:
        for name in ("subject", "seen", "fix"):
            object.__setattr__(self, name, redact(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """Limits for findings, in seconds by the checked server's clock; the alerts' own, where there is an alert."""

    connect_s: float = 3.0
    """Time for one answer of a server."""
    server_s: float = 12.0
    """Time for all checks of a server."""
    transaction_s: float = ALERTS["MqlayerTransactionOpen"].above
    """Age of an open or prepared transaction."""
    transaction_broken_s: float = 600.0
    """The same, with locks on mqlayer's tables."""
    outbox_s: float = ALERTS["MqlayerOutboxLate"].above
    """Age of outbox rows."""
    unarmed_s: float = ALERTS["MqlayerNodeAway"].for_s
    """Time without an armed run of a node."""
    change_s: float = ALERTS["MqlayerRouteChangeStuck"].above
    """Age of an unfinished route change."""
    parked_s: float = ALERTS["MqlayerParkedKeysOverdue"].above
    """Delay of parked keys that are due."""
    archive_s: float = ALERTS["MqlayerArchiveLate"].above
    """Time since an archiver was at a topic's end."""
    export_s: float = ALERTS["MqlayerExportLate"].above
    """Time since an export got the last batches, where it lacks some."""
    schedule_s: float = ALERTS["MqlayerScheduleLate"].above
    """Time for which a schedule may be due without a run."""
    deletion_s: float = 3600.0
    """Age of an unfinished deletion of a topic."""
    finalize_s: float = 7 * 86_400.0
    """Time for which an upgrade may wait to be finalized."""
    replaced_s: float = 86_400.0
    """Time to report a replaced Postgres."""
    clock_s: float = 1.0
    """Clock difference to this machine; only ever a warning."""
    synchronous_s: float = ALERTS["MqlayerCommitsWait"].above
    """Wait of a COMMIT for a synchronous standby."""
    slot_transactions: float = 1e6
    """Transactions for which a replica holds rows back."""
    slot_bytes: float = 1e10
    """Log that is kept for a replica."""
    part: float = 0.8
    """Used share of connections and memory."""


LIMITS: Final = CheckLimits()

Subject = TypeVar("Subject")
Check = Callable[[Subject, CheckLimits], list[Finding]]

ASK_AGAIN: Final = "see why it does not answer, then ask again"


def run_checks(checks: Mapping[str, Check[Subject]], subject: Subject, name: str, limits: CheckLimits) -> list[Finding]:
    """Run checks; one that fails becomes an UNKNOWN finding."""
    found: list[Finding] = []
    for check, run_check in checks.items():
        try:
            found += run_check(subject, limits)
        except MqlayerError as error:
            found.append(Finding(check, name, CheckStatus.UNKNOWN, str(error), ASK_AGAIN))
    return found


def format_seconds(seconds: float) -> str:
    """Return a duration for people."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
