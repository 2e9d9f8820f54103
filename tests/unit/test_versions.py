"""Which versions of servers are good, old or known to be bad."""

from __future__ import annotations

import pytest

from mqlayer.doctor.clocks import clock_finding
from mqlayer.doctor.findings import LIMITS, CheckStatus, Finding, format_seconds
from mqlayer.doctor.versions import Product, ServerVersion, postgres_finding, redis_finding


@pytest.mark.parametrize(
    ("product", "version", "verdict", "named"),
    [
        ("redis", (6, 0, 16), "broken", "6.0.16"),
        ("redis", (6, 2, 14), "warning", "no flags"),
        ("redis", (6, 2, 14), "warning", "CVE-2025-49844"),
        ("redis", (7, 0, 15), "warning", "unless this build has the fix"),
        ("redis", (7, 4, 2), "warning", "WAITAOF"),
        ("redis", (7, 4, 6), "warning", "CVE-2026-23479"),
        ("redis", (8, 2, 1), "warning", "CVE-2025-49844"),
        ("redis", (8, 6, 2), "warning", "CVE-2026-23479"),
        ("redis", (8, 6, 3), "ok", "redis 8.6.3"),
        ("redis", (9, 0, 0), "ok", ""),
        ("valkey", (7, 2, 10), "warning", "CVE-2025-49844"),
        ("valkey", (7, 2, 11), "ok", "valkey 7.2.11"),
        ("valkey", (8, 1, 3), "warning", "CVE-2025-49844"),
        ("valkey", (9, 0, 0), "ok", ""),
    ],
)
def test_a_node_of_a_bad_version_is_told_why(
    product: Product, version: ServerVersion, verdict: str, named: str
) -> None:
    """TRAPS 2c."""
    finding = redis_finding("node n1", product, version)
    assert finding.verdict == verdict
    assert named in finding.seen
    assert bool(finding.fix) == (verdict != "ok")


def test_a_false_waitaof_is_fixed_in_the_third_release_of_its_series() -> None:
    assert "WAITAOF" not in redis_finding("node n1", "redis", (7, 4, 3)).seen


@pytest.mark.parametrize(
    ("number", "verdict"), [(140_012, "broken"), (150_000, "ok"), (180_004, "ok"), (190_000, "warning")]
)
def test_a_postgres_is_neither_too_old_nor_untried(number: int, verdict: str) -> None:
    assert postgres_finding("database", number).verdict == verdict


@pytest.mark.parametrize(
    ("ahead_s", "round_trip_s", "verdict"),
    [(0.2, 0.0, "ok"), (-0.9, 0.0, "ok"), (1.5, 0.0, "warning"), (-3_600.0, 0.1, "warning"), (1.5, 2.0, "ok")],
)
def test_a_clock_is_odd_at_the_most(ahead_s: float, round_trip_s: float, verdict: str) -> None:
    """Nothing is judged by clients' clocks, so no difference is more than a warning."""
    assert clock_finding("node n1", ahead_s, round_trip_s, LIMITS).verdict == verdict


def test_no_field_of_a_finding_holds_a_password() -> None:
    secret = "redis://user:s3cret@127.0.0.1/0 password=s3cret"
    assert "s3cret" not in str(Finding("reachable", secret, CheckStatus.BROKEN, secret, secret))


def test_durations_are_shown_as_people_read_them() -> None:
    assert [format_seconds(s) for s in (0.25, 42.0, 90.0, 150.0, 7_300.0, 200_000.0)] == [
        "0.2 s", "42 s", "90 s", "2 min", "2 h", "2 d",
    ]  # fmt: skip
