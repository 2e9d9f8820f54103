"""Clocks: nothing is judged by a client's clock, so a difference is odd, and never breaks anything."""

from __future__ import annotations

from mqlayer.doctor.findings import CheckLimits, CheckStatus, Finding


def clock_finding(subject: str, ahead_s: float, round_trip_s: float, limits: CheckLimits) -> Finding:
    """Judge how far a server's clock is ahead of ours, within half a round trip."""
    seen = f"{abs(ahead_s):.3f} s {'ahead of' if ahead_s >= 0 else 'behind'} this machine"
    if abs(ahead_s) - round_trip_s / 2 <= limits.clock_s:
        return Finding("clock", subject, CheckStatus.OK, seen)
    fix = "set both by NTP (chrony): no lease and no order goes by it, but starts by time, times in records and logs do"
    return Finding("clock", subject, CheckStatus.WARNING, seen, fix)
