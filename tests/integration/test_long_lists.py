"""Pages, counts and errors of long lists: each row once, whatever a page looks at, and what the bench asks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from bench.long_lists import fill_group, questions
from bench.rebalance import new_group
from bench.stage import System
from mqlayer.errors import InvalidInput
from mqlayer.postgres.database import Database
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
        page = parked_keys(database, wanted, after=after, limit=7)
        found += [one.name for one in page]
        if page.next is None:
            return found
        after = page.next


def walk_dead(database: Database, wanted: DeadFilter, **where: str) -> list[int]:
    found, after = [], None
    while True:
        page = dead_messages(database, wanted, **where, after=after, limit=7)  # type: ignore[arg-type]
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
