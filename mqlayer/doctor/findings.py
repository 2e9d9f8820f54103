"""What a check found, and the bounds by which checks judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from mqlayer.errors import MqlayerError, redact


class CheckStatus(StrEnum):
    """How something is. *unknown*: it could not be asked."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: the check, what it looked at, how that is, what was seen, and how to repair it.

    No field ever holds a password.
    """

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
    """From where on something is worth a line. Durations are seconds by the clock of the server that is asked."""

    connect_s: float = 3.0
    """How long one server may take to answer one question."""
    server_s: float = 12.0
    """How long all questions to one server may take; servers are asked side by side."""
    transaction_s: float = 30.0
    """Age of an open or prepared transaction."""
    transaction_broken_s: float = 600.0
    """The same, for one that holds locks on our tables."""
    waiting_s: float = 30.0
    """How long outbox rows and route changes may wait, and a periodic job may be overdue."""
    replaced_s: float = 86_400.0
    """For how long it is told that a Postgres was replaced, which may have lost commits."""
    clock_s: float = 1.0
    """How far a server's clock may be from ours. Nothing is judged by clients' clocks, so it never is more than odd."""
    part: float = 0.8
    """How much of connections and memory may be in use."""


LIMITS: Final = CheckLimits()

Subject = TypeVar("Subject")
Check = Callable[[Subject, CheckLimits], list[Finding]]

ASK_AGAIN: Final = "see why it does not answer, then ask again"


def run_checks(checks: Mapping[str, Check[Subject]], subject: Subject, name: str, limits: CheckLimits) -> list[Finding]:
    """Run checks one by one; one that could not ask becomes a finding that says so, and the others go on."""
    found: list[Finding] = []
    for check, run_check in checks.items():
        try:
            found += run_check(subject, limits)
        except MqlayerError as error:
            found.append(Finding(check, name, CheckStatus.UNKNOWN, str(error), ASK_AGAIN))
    return found


def format_seconds(seconds: float) -> str:
    """Return a duration as people read it."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
