"""Clock differences: only ever a warning."""

from __future__ import annotations

from mqlayer.doctor.findings import CheckLimits, CheckStatus, Finding


def clock_finding(subject: str, ahead_s: float, round_trip_s: float, limits: CheckLimits) -> Finding:
    """Judge a server's lead over this clock."""
    seen = f"{abs(ahead_s):.3f} s {'ahead of' if ahead_s >= 0 else 'behind'} this machine"
    if abs(ahead_s) - round_trip_s / 2 <= limits.clock_s:
        return Finding("clock", subject, CheckStatus.OK, seen)
    fix = "set both by NTP (chrony): no lease and no order goes by it, but starts by time, times in records and logs do"
    return Finding("clock", subject, CheckStatus.WARNING, seen, fix)
