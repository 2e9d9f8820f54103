"""Pages, counts and errors of long lists: each row once, whatever a page looks at, and what the bench asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import SecretStr

from bench.long_lists import FILL, fill_group, questions
from bench.rebalance import new_group
from bench.stage import System
from mqlayer.domain.routing import PartitionId
from mqlayer.errors import InvalidInput
from mqlayer.groups import Group
from mqlayer.parking.store import ParkingStore, Span
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import columns, query
from mqlayer.redelivery import (
    BoundedCount,
    DeadFilter,
    ParkedFilter,
    dead_messages,
    estimate_dead,
    estimate_parked,
    lists,
    parked_keys,
    plan_bulk,
    release_all,
    top_errors,
)
from mqlayer.settings import Settings
from mqlayer.topics import create_topic, register_node
from tests.fixtures.servers import StartRedis
from tests.proof.runtimes import runtime_of

ROWS = 300
PLANNED = 8_000
FEW, MANY = 400, 4_000
BATCH = 100
KEY_ERRORS = 100
"""Every third one."""


@pytest.fixture
def system(database_dsn: str, key_prefix: str, start_redis: StartRedis) -> Iterator[System]:
    settings, url = Settings(dsn=SecretStr(database_dsn), key_prefix=key_prefix), start_redis().url
    with Database(database_dsn) as database:
        runtime = runtime_of(database, settings=settings, application=database)
        register_node(runtime, name="n1", url=url)
        yield System(runtime, create_topic(runtime, "bench", partitions=1), url)


def walk_parked(database: Database, wanted: ParkedFilter) -> list[bytes]:
    found, after = [], None
    while True:
        page = parked_keys(database, wanted, after=after, limit=19)
        found += [one.name for one in page]
        if page.next is None:
            return found
        after = page.next


def walk_dead(database: Database, wanted: DeadFilter, **where: str) -> list[int]:
    found, after = [], None
    while True:
        page = dead_messages(database, wanted, **where, after=after, limit=19)  # type: ignore[arg-type]
        found += [one.dead_id for one in page]
        if page.next is None:
            return found
        after = page.next


def test_pages_give_each_row_once_and_counts_say_where_they_end(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, first, other = system.database, new_group(system), new_group(system)
    for group in (first, other):
        fill_group(system, group, ROWS)
    for scan in (10_000, 20):
        monkeypatch.setattr(lists, "SCAN_LIMIT", scan)
        monkeypatch.setattr(lists, "ERROR_SCAN_LIMIT", scan)
        for of_group, times in (((first.topic, first.name), 1), ((first.topic, None), 2), ((None, None), 2)):
            for error, rows in ((None, ROWS), ("KEYERROR", KEY_ERRORS), ("nowhere", 0)):
                names = walk_parked(database, ParkedFilter(topic=of_group[0], group=of_group[1], error=error))
                assert (len(names), len(set(names))) == (times * rows, rows), (scan, of_group, error)
                where = {name: value for name, value in zip(("topic", "group"), of_group, strict=True) if value}
                ids = walk_dead(database, DeadFilter(error=error), **where)
                assert len(ids) == len(set(ids)) == times * rows, (scan, of_group, error)
        mine = ParkedFilter(first.topic, first.name)
        exact = scan > ROWS
        counted = BoundedCount(ROWS if exact else scan, exact)
        assert estimate_parked(database, mine) == counted
        assert estimate_dead(database, topic=first.topic, group=first.name) == counted
    assert estimate_dead(database, DeadFilter(error="keyerror"), topic="mails") == BoundedCount(0, exact=True)
    with pytest.raises(InvalidInput, match="no dead message"):
        dead_messages(database, after=999_999_999)


def test_a_page_with_redriven_messages_reads_indexes_and_little_more_than_it_shows(system: System) -> None:
    """Latest first over both kinds, where nine of ten were given back; of a group, of a topic, of all."""
    group = new_group(system)
    fill_group(system, group, PLANNED)
    with system.database.connection() as connection:
        connection.execute("UPDATE mqlayer.dead_message SET redriven_at = now() WHERE seq % 10 > 0")
        connection.execute("ANALYZE mqlayer.dead_message")
    for topic, name in ((group.topic, group.name), (group.topic, None), (None, None)):
        found, after = [], None
        for _ in range(3):
            page = dead_messages(system.database, topic=topic, group=name, redriven=True, after=after)
            found += [one.identity.seq for one in page]
            after = page.next
        assert found == list(range(1, 151))
        for redriven in (True, False):
            nodes = [
                node for node in plan(system, topic, name, redriven) if node.get("Relation Name") == "dead_message"
            ]
            assert {node["Node Type"] for node in nodes} <= {"Index Scan", "Index Only Scan"}
            assert sum(node["Actual Rows"] * node["Actual Loops"] for node in nodes) <= 150


def plan(system: System, topic: str | None, name: str | None, redriven: bool) -> list[dict[str, Any]]:
    """Return the plan's nodes of the first page, as it ran."""
    with system.database.connection() as connection, connection.transaction():
        facts = lists._dead_facts(connection, DeadFilter(), topic, name) | lists._behind(connection, None)
        explain = f"EXPLAIN (ANALYZE, FORMAT JSON) {query('dead_list')}".encode()
        ((answer,),) = connection.execute(explain, facts | {"redriven": redriven, "limit": 50}).fetchall()
    return list(walk(answer[0]["Plan"]))


def walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a plan's nodes."""
    yield node
    for child in node.get("Plans", []):
        yield from walk(child)


def test_a_claim_of_parked_keys_takes_no_more_than_asked_for(system: System) -> None:
    """Where nothing is known of a group's keys yet, the planner takes them for one."""
    known, new = new_group(system), new_group(system)
    fill_group(system, known, MANY)
    with system.database.connection() as connection:
        rows = {"group_id": new.group_id, "partition": system.route.ranges[0].partition, "from": 1, "upto": 50}
        for statement in FILL:
            connection.execute(statement.encode(), rows)
        connection.execute("UPDATE mqlayer.parked_key SET due_at = now() WHERE group_id = %s", (new.group_id,))
        facts = {"group_id": new.group_id, "lp_from": 0, "lp_to": 1024, "count": 7, "visible_s": 30.0}
        for _ in range(3):
            assert len(connection.execute(query("pop_parked_claim"), facts).fetchall()) == 7


def test_frequent_errors_are_counted_by_what_stands_before_the_colon(system: System) -> None:
    group = new_group(system)
    fill_group(system, group, ROWS)
    names = {"TimeoutError", "KeyError", "ConnectionError"}
    for of in ("dead", "attempts"):
        found = top_errors(system.database, group.topic, group.name, of=of)
        assert ({one.error for one in found}, {one.count for one in found}) == (names, {KEY_ERRORS})
        assert {one.looked for one in found} == {ROWS}
    for name, ask in questions(system, group).items():
        assert ask() is not None, name


def test_a_member_reads_a_parked_key_once_however_many_partitions_it_owns(system: System) -> None:
    """A join would compare each of its ranges of LPs with all of the group's keys, and read all of its messages."""
    group = new_group(system)
    park(system, group, MANY)
    bounds = range(0, 1_024, 32)
    spans = [Span(PartitionId(number), lp, lp + 32, MANY - 9) for number, lp in enumerate(bounds, start=1)]
    facts = {"group_id": group.group_id} | columns(("partitions", "lps_from", "lps_to", "committed"), spans)
    for analyzed in (False, True):
        with system.database.connection() as connection, connection.transaction():
            if analyzed:
                connection.execute("ANALYZE mqlayer.parked_key, mqlayer.parked_message")
            assert touched(explain(connection, "parked_keys", facts)) <= MANY, analyzed
            assert touched(explain(connection, "parked_unsettled", facts)) <= len(spans), analyzed
    loaded = ParkingStore(system.database, group.group_id, "m1").load(spans)
    assert {name: state.parking_version for name, state in loaded.items()} == {span.partition: 0 for span in spans}
    assert sum(len(state.keys) for state in loaded.values()) == MANY
    for span in spans:
        assert {span.lp_from <= key.ref.lp < span.lp_to for key in loaded[span.partition].keys} == {True}
    assert [len(state.unsettled) for state in loaded.values()] == [10] + [0] * (len(spans) - 1)


def test_a_batch_of_a_bulk_action_reads_its_own_keys_and_no_others(system: System) -> None:
    """Nothing is known of a set that was planned just now: each join by key would read all keys of the group."""
    for analyzed in (False, True):
        read = {}
        for rows in (FEW, MANY):
            group = new_group(system)
            park(system, group, rows)
            planned = plan_bulk(system.runtime, "release", group.topic, group.name, ParkedFilter(), first=True)
            with system.database.connection() as connection:
                if analyzed:
                    connection.execute("ANALYZE mqlayer.parked_key, mqlayer.parked_message, mqlayer.bulk_item")
            read[rows] = read_by_batch(system, group, planned.bulk_id)
            assert release_all(system.runtime, group.topic, group.name) == rows
        for name, few in read[FEW].items():
            assert 0 < read[MANY][name] <= few + BATCH, (name, analyzed, read)


def park(system: System, group: Group, rows: int) -> None:
    """Park keys of a group, each with a message that failed, and none of which is due."""
    facts = {"group_id": group.group_id, "partition": system.route.ranges[0].partition, "from": 1, "upto": rows}
    with system.database.connection() as connection:
        for statement in FILL[:2]:
            connection.execute(statement.encode(), facts)
        connection.execute("UPDATE mqlayer.parked_message SET attempts = 1 WHERE group_id = %(group_id)s", facts)


def read_by_batch(system: System, group: Group, bulk_id: int) -> dict[str, int]:
    """Return how many rows each statement of a batch in the middle touches."""
    facts: dict[str, Any] = {"redrive_id": bulk_id, "group_id": group.group_id, "act": "release", "error": None}
    facts |= {"at_number": BATCH, "limit": BATCH}
    with system.database.connection() as connection, connection.transaction(force_rollback=True):
        keys = connection.execute(query("bulk_next_parked"), facts).fetchall()
        assert {len(keys), *(row[-1] for row in keys)} == {BATCH, None}
        facts |= {"numbers": [row[0] for row in keys], "results": ["done"] * BATCH}
        facts |= {"lps": [row[1] for row in keys], "names": [row[2] for row in keys]}
        steps = ("bulk_hold_keys", "bulk_next_parked", "parked_release", "parked_heads_failed", "bulk_results")
        return {name: touched(explain(connection, name, facts)) for name in steps}


def explain(connection: Connection, name: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the plan's nodes of a query, as it ran."""
    text = f"EXPLAIN (ANALYZE, FORMAT JSON) {query(name)}".encode()
    ((answer,),) = connection.execute(text, facts, prepare=False).fetchall()
    return list(walk(answer[0]["Plan"]))


def touched(nodes: list[dict[str, Any]]) -> int:
    """Return the most rows that a node of a plan gave or dropped."""
    dropped = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Join Filter", "Rows Removed by Index Recheck")
    return max(int(sum(node.get(name, 0) for name in dropped) * node["Actual Loops"]) for node in nodes)
