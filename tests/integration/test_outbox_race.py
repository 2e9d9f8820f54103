"""Cases 72 to 74: writers race on a few keys without a lock of their own, and the outbox keeps the order of commits.

The same writers and the same judge show that two published recipes do not: see tests/proof/planted_bugs.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import redis
from pydantic import SecretStr

from mqlayer.postgres.database import Database
from mqlayer.relay import Relay, relay_once
from mqlayer.runtime.route_cache import load_route
from mqlayer.settings import Settings
from mqlayer.topics import create_topic, register_node
from tests.fixtures.wait import wait_until
from tests.proof.checker import Breach, Verdict, check
from tests.proof.history import History, read_histories
from tests.proof.our_outbox import TOPIC, OurOutbox
from tests.proof.outbox_race import GROUP, Race, delivered, run_race, run_writers
from tests.proof.planted_bugs import Outbox, OutboxById, OutboxByTransaction
from tests.proof.runtimes import runtime_of
from tests.proof.streams import read_partition, record_count

ROUNDS_LIMIT_S = 60.0
"""How long a wrong recipe may go unnoticed; it takes one or two rounds of half a second."""


def prepare(outbox: Outbox, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        outbox.prepare(connection)


def race_until(breach: Breach, outbox: Outbox, dsn: str, directory: Path) -> Verdict:
    """Return the verdict of the first round that shows the breach, or of the last one."""
    deadline = time.monotonic() + ROUNDS_LIMIT_S
    verdict, seed = None, 0
    while verdict is None or (breach not in verdict.broken and time.monotonic() < deadline):
        seed += 1
        round_directory = directory / str(seed)
        round_directory.mkdir()
        prepare(outbox, dsn)
        verdict = run_race(Race(seed=seed), outbox, dsn, round_directory)
    return verdict


def test_our_outbox_loses_nothing_and_keeps_the_order_of_commits(database_dsn: str, tmp_path: Path) -> None:
    outbox = OurOutbox()
    prepare(outbox, database_dsn)
    verdict = run_race(Race(transactions_each=250), outbox, database_dsn, tmp_path)
    assert verdict.clean, verdict
    assert verdict.delivered == verdict.messages > 1_500


def test_reading_by_id_loses_messages_that_become_visible_late(empty_database_dsn: str, tmp_path: Path) -> None:
    verdict = race_until(Breach.LOST, OutboxById(), empty_database_dsn, tmp_path)
    assert verdict.counts[Breach.LOST] > 0, verdict


def test_reading_by_transaction_reverses_messages_in_real_time(empty_database_dsn: str, tmp_path: Path) -> None:
    verdict = race_until(Breach.REAL_TIME_INVERSION, OutboxByTransaction(), empty_database_dsn, tmp_path)
    assert verdict.counts[Breach.REAL_TIME_INVERSION] > 0, verdict
    assert verdict.counts[Breach.LOST] == 0, verdict


@pytest.fixture
def settings(database_dsn: str, redis_url: str, key_prefix: str) -> Settings:
    """A topic with two partitions on one node, and an outbox that has its source."""
    settings = Settings(dsn=SecretStr(database_dsn), key_prefix=key_prefix)
    with Database(database_dsn) as database:
        register_node(runtime_of(database), name="node-1", url=redis_url)
        create_topic(runtime_of(database, key_prefix, application=database), TOPIC, partitions=2)
    relay_once(settings)
    return settings


@contextmanager
def relays(settings: Settings, *, count: int) -> Iterator[None]:
    """Run relays in threads; a failure of one is raised at the end."""
    running = [Relay(settings) for _ in range(count)]
    with ThreadPoolExecutor(max_workers=count) as pool:
        ends = [pool.submit(relay.run) for relay in running]
        try:
            yield
        finally:
            for relay in running:
                relay.stop()
    for end in ends:
        end.result()


def record_streams(settings: Settings, client: redis.Redis, partitions: Iterable[int], directory: Path) -> None:
    with History(directory, "streams") as history:
        for partition in partitions:
            for append in read_partition(client, settings.key_prefix, partition, TOPIC):
                history.note(append)
                history.note(delivered(append))


@pytest.mark.full
def test_two_relays_bring_all_to_the_partitions_in_the_order_of_commits(
    settings: Settings, database_dsn: str, redis_url: str, tmp_path: Path
) -> None:
    with Database(database_dsn) as database, database.connection() as connection:
        (source,) = connection.execute("SELECT source_id FROM mqlayer.source").fetchone() or (0,)
        partitions = [each.partition for each in load_route(database, TOPIC).ranges]
    with redis.Redis.from_url(redis_url) as client:
        with relays(settings, count=2):
            race = Race(transactions_each=150)
            committed = run_writers(race, OurOutbox(source=source), database_dsn, tmp_path)
            wait_until(
                lambda: record_count(client, settings.key_prefix, partitions) >= committed,
                timeout_s=60,
                what=f"{committed} records in the partitions",
            )
        record_streams(settings, client, partitions, tmp_path)
    verdict = check(read_histories(tmp_path), flows=[(GROUP, TOPIC)])
    assert verdict.clean, verdict
    assert verdict.delivered == verdict.messages == committed
