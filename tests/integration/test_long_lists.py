"""Pages, counts and errors of long lists: each row once, whatever a page looks at, and what the bench asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import SecretStr

from bench.long_lists import fill_group, questions
from bench.rebalance import new_group
from bench.stage import System
from mqlayer.errors import InvalidInput
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.redelivery import (
    BoundedCount,
    DeadFilter,
    ParkedFilter,
    dead_messages,
    estimate_dead,
    estimate_parked,
    lists,
    parked_keys,
    top_errors,
)
from mqlayer.settings import Settings
from mqlayer.topics import create_topic, register_node
from tests.fixtures.servers import StartRedis
from tests.proof.runtimes import runtime_of

ROWS = 300
PLANNED = 8_000
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
