"""Which versions of servers are good, old or known to be bad."""

from __future__ import annotations

import pytest

from mqlayer.doctor.clocks import clock_finding
from mqlayer.doctor.findings import LIMITS, CheckStatus, Finding, format_seconds
from mqlayer.doctor.nodes import CheckedNode, check_durable_topics
from mqlayer.doctor.versions import postgres_finding, redis_finding
from mqlayer.domain.routing import NodeId
from mqlayer.redis.node_connection import Node
from mqlayer.redis.server_info import ServerInfo
from mqlayer.redis.server_versions import Product, ServerVersion, product_of, waitaof_is_early


@pytest.mark.parametrize(
    ("product", "version", "verdict", "named"),
    [
        ("redis", (6, 0, 16), "broken", "6.0.16"),
        ("redis", (6, 2, 14), "warning", "no flags"),
        ("redis", (6, 2, 14), "warning", "CVE-2025-49844"),
        ("redis", (7, 0, 15), "warning", "unless this build has the fix"),
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


@pytest.mark.parametrize(
    ("product", "version", "early"),
    [
        ("redis", (7, 2, 0), False),
        ("redis", (7, 4, 0), True),
        ("redis", (7, 4, 2), True),
        ("redis", (7, 4, 3), False),
        ("redis", (8, 0, 0), False),
        ("valkey", (7, 2, 11), False),
        ("valkey", (8, 0, 0), True),
        ("valkey", (9, 1, 2), True),
    ],
)
def test_the_servers_that_confirm_a_sync_before_it_are_known(
    product: Product, version: ServerVersion, early: bool
) -> None:
    """`test_disk_needs_a_server_that_tells_of_its_syncs` holds it against the server of each row of the matrix."""
    assert waitaof_is_early(product, version) is early


@pytest.mark.parametrize(
    ("valkey", "settings", "broken"),
    [
        ("9.1.2", {"appendfsync": "everysec"}, True),
        ("9.1.2", {"appendfsync": "always"}, False),
        ("9.1.2", {}, True),
        ("7.2.11", {"appendfsync": "everysec"}, False),
        ("7.2.11", {}, False),
    ],
)
def test_a_node_that_confirms_a_sync_before_it_is_told(valkey: str, settings: dict[str, str], broken: bool) -> None:
    """One whose topic had class `disk` before the server was exchanged; without CONFIG nothing is known."""
    answers = ServerInfo({"redis_version": "7.2.4", "valkey_version": valkey}, settings, 0.0, 0.0)
    node = Node(NodeId(1), "n1", "redis://h", "run")
    (finding,) = check_durable_topics(CheckedNode(node, None, answers, {"disk": "orders"}), LIMITS)
    assert (finding.verdict == "broken") is broken
    assert ("topic orders waits for disk, and this server confirms a sync before it" in finding.seen) is broken
    assert finding.fix == "CONFIG SET appendfsync always" * broken


def test_a_valkey_is_known_by_its_own_version() -> None:
    assert product_of({"redis_version": "7.2.4", "valkey_version": "9.1.2\r"}) == ("valkey", (9, 1, 2))
    assert product_of({"redis_version": "7.4.2\r"}) == ("redis", (7, 4, 2))


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
