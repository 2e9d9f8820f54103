"""Statements that run all the time stay cheap when the outbox is large: their plans, on real rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from mqlayer.postgres.queries import query

ROWS = 40_000
ALL_SETS = list(range(16))

HOT: dict[str, dict[str, Any]] = {
    "outbox_scan": {"after": ROWS // 2, "lp_sets": ALL_SETS, "limit": 250, "bytes": 4_000_000},
    "outbox_late": {"ids": [17, 4_711], "lp_sets": ALL_SETS, "bytes": 4_000_000},
    "outbox_of_lps": {"topic_ids": [1, 1], "lps": [5, 700], "afters": [10, 0], "each": 100, "bytes": 4_000_000},
}
"""What every poll of a relay asks; where a limit bounds the answer, much more waits."""


@pytest.fixture(scope="module")
def large_outbox(postgres_server: Any, migrated_template: str) -> Iterator[psycopg.Connection[Any]]:
    """An outbox that filled up within one slot, most of it relayed, and statistics from when it was nearly empty."""
    name = "mqlayer_test_plans"
    with psycopg.connect(postgres_server.create_database(name, template=migrated_template)) as connection:
        facts = {"topic_id": 1, "name": "orders", "body_limit": 1_000}
        connection.execute(query("outbox_topic_put"), facts)
        connection.execute(query("outbox_counters_put"), facts)
        for slot in range(4):
            connection.execute(f"ALTER TABLE mqlayer_app.outbox_{slot} SET (autovacuum_enabled = off)".encode())
        fill(connection, 1, 400)
        connection.execute("ANALYZE mqlayer_app.outbox")
        fill(connection, 401, ROWS)
        connection.execute(query("relay_settings"))
        connection.execute(query("outbox_identity_put"))
        connection.execute("UPDATE mqlayer_app.counter SET seq = %s / 1024 + 1", (ROWS,))
        connection.execute(
            "INSERT INTO mqlayer_app.relayed SELECT topic_id, lp, seq FROM mqlayer_app.counter WHERE lp <> 5"
        )
        connection.commit()
        yield connection
    postgres_server.drop_database(name)


def test_what_a_relay_has_to_sort_is_not_compiled_for_each_run(large_outbox: psycopg.Connection[Any]) -> None:
    """It does not sort by choice, which the planner takes for a price at which compiling pays."""
    row = large_outbox.execute(
        "EXPLAIN (ANALYZE, FORMAT JSON) SELECT d.lp, min(d.due_at) FROM mqlayer_app.delayed d GROUP BY d.lp ORDER BY 2"
    ).fetchone()
    large_outbox.rollback()
    assert row is not None
    assert row[0][0]["Plan"]["Node Type"] == "Sort"
    assert "JIT" not in row[0][0]


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("plans", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("name", sorted(HOT))
def test_no_poll_reads_a_whole_slot(
    large_outbox: psycopg.Connection[Any], name: str, plans: str, *, analyzed: bool
) -> None:
    if analyzed:
        large_outbox.execute("ANALYZE mqlayer_app.outbox")
    nodes = explain(large_outbox, name, HOT[name], plans)
    scans = [node for node in nodes if node.get("Relation Name", "").startswith("outbox_")]
    assert scans, nodes
    assert {node["Node Type"] for node in scans} <= {"Index Scan", "Bitmap Heap Scan", "Index Only Scan"}
    assert 0 < sum(node["Actual Rows"] * node["Actual Loops"] for node in scans) <= 300
    large_outbox.rollback()


def test_the_sweep_reads_the_counters_and_no_outbox_row(large_outbox: psycopg.Connection[Any]) -> None:
    nodes = explain(large_outbox, "counter_news", {"lp_sets": ALL_SETS}, "force_generic_plan")
    tables = {node["Relation Name"] for node in nodes if "Relation Name" in node}
    assert tables == {"counter", "relayed"}
    (news,) = large_outbox.execute(query("counter_news"), {"lp_sets": ALL_SETS}).fetchall()
    assert news[0] == 1024 + 5
    large_outbox.rollback()


def test_finding_where_a_backlog_begins_probes_one_row_per_lp(large_outbox: psycopg.Connection[Any]) -> None:
    nodes = explain(large_outbox, "outbox_backlog", {"lp_sets": ALL_SETS}, "force_custom_plan")
    scans = [node for node in nodes if node.get("Relation Name", "").startswith("outbox_")]
    assert {node["Node Type"] for node in scans} <= {"Index Scan", "Bitmap Heap Scan"}
    assert sum(node["Actual Rows"] * node["Actual Loops"] for node in scans) <= 4
    large_outbox.rollback()


def test_publishing_finds_its_counter_by_an_index(large_outbox: psycopg.Connection[Any]) -> None:
    cursor = large_outbox.execute(
        "EXPLAIN (FORMAT JSON) UPDATE mqlayer_app.counter c SET seq = c.seq + 1 WHERE c.topic = 'orders' AND c.lp = 7"
    )
    nodes = list(walk((cursor.fetchone() or [[{}]])[0][0]["Plan"]))
    assert [node.get("Index Name") for node in nodes if node["Node Type"] != "ModifyTable"] == ["counter_topic_unique"]
    large_outbox.rollback()


def fill(connection: psycopg.Connection[Any], first: int, last: int) -> None:
    """Put rows into the current slot of the outbox."""
    connection.execute(
        "INSERT INTO mqlayer_app.outbox (id, topic_id, lp, slot, seq, created_at, key, body) "
        "SELECT n, 1, n %% 1024, 3, n / 1024 + 1, now(), 'k', 'body' FROM generate_series(%s::int, %s) AS n",
        (first, last),
    )


def explain(
    connection: psycopg.Connection[Any], name: str, arguments: dict[str, Any], plans: str
) -> list[dict[str, Any]]:
    """Return the nodes of the plan as it ran."""
    connection.execute(f"SET LOCAL plan_cache_mode = {plans}".encode())
    known = connection.execute("SELECT outbox_uuid, mqlayer_app.term_v1() FROM mqlayer_app.identity").fetchone()
    assert known is not None
    text = f"EXPLAIN (ANALYZE, FORMAT JSON) {query(name)}"
    facts = arguments | {"outbox_uuid": known[0], "term": known[1]}
    row = connection.execute(text.encode(), facts, prepare=True).fetchone()
    assert row is not None
    return list(walk(row[0][0]["Plan"]))


def walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return a plan's nodes."""
    yield node
    for child in node.get("Plans", []):
        yield from walk(child)
