"""Acts of owners and operators on parked keys read those keys, however many others are parked: what the bench reads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import psycopg
import pytest
from pydantic import SecretStr

from bench.filled import Scene
from bench.stage import System
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.settings import Settings
from mqlayer.topics import create_topic, register_node
from tests.fixtures.servers import StartRedis
from tests.proof.runtimes import runtime_of

FEW, MANY = 1_000, 4_000
LP = 7
KEYS_OF_LP = """
INSERT INTO mqlayer.parked_key (group_id, lp, name, cause, attempts)
SELECT %(group_id)s, %(lp)s, convert_to('key-' || n, 'UTF8'), 'exhausted', 1
FROM generate_series(1, %(rows)s::int) AS n
"""
MESSAGES_OF_LP = """
INSERT INTO mqlayer.parked_message
    (group_id, lp, name, source, seq, position, partition_id, log_offset, key, m, body)
SELECT %(group_id)s, %(lp)s, convert_to('key-' || n, 'UTF8'), 1, n, n * 16777216::bigint, %(partition)s, n,
       convert_to('key-' || n, 'UTF8'), '1:1:1:1', 'x'
FROM generate_series(1, %(rows)s::int) AS n
"""
PARKED_ACTS = ("park 100", "unpark 100")
"""A release by its batches: see test_long_lists.py."""


@pytest.fixture
def system(database_dsn: str, key_prefix: str, start_redis: StartRedis) -> Iterator[System]:
    settings, url = Settings(dsn=SecretStr(database_dsn), key_prefix=key_prefix), start_redis().url
    with Database(database_dsn) as database:
        runtime = runtime_of(database, settings=settings, application=database)
        register_node(runtime, name="n1", url=url)
        yield System(runtime, create_topic(runtime, "bench", partitions=1), url)


@pytest.mark.parametrize(
    ("many", "analyzed"),
    [
        (MANY, False),
        pytest.param(MANY, True, marks=pytest.mark.full),
        pytest.param(100_000, False, marks=[pytest.mark.full, pytest.mark.slow]),
        pytest.param(100_000, True, marks=[pytest.mark.full, pytest.mark.slow]),
    ],
)
def test_an_act_on_parked_keys_reads_no_others(
    system: System, monkeypatch: pytest.MonkeyPatch, many: int, *, analyzed: bool
) -> None:
    """Late statistics know another group's keys only: by those, a join by key would read all keys of the group."""
    monkeypatch.setattr("bench.filled.ROUNDS", 1)
    known = Scene(system)
    known.fill({"outbox": 0, "fence": 0, "parked": FEW})
    known.analyze()
    known.database.close()
    read = {}
    for rows in (FEW, many):
        scene = Scene(system)
        scene.fill({"outbox": 0, "fence": 0, "parked": rows})
        if analyzed:
            scene.analyze()
        acts = scene.acts()
        read[rows] = {name: scene.read(name, acts[name]) for name in PARKED_ACTS}
        scene.database.close()
    for name, few in read[FEW].items():
        assert 0 < read[many][name].rows <= 1.1 * few.rows + 100, (name, read)
        assert read[many][name].pages <= 3 * few.pages + 100, (name, read)


@pytest.mark.parametrize("analyzed", [False, True])
def test_messages_of_parked_keys_end_without_a_look_at_others_of_their_lp(system: System, *, analyzed: bool) -> None:
    """All statistics of the group are missing, and those of its LP: without a key's name, all indexes look alike."""
    read = {}
    for rows in (200, 5_000):
        # With sessions of its own: plans, also those of triggers, stay in a session.
        scene = Scene(system)
        facts = {"group_id": scene.group.group_id, "lp": LP, "partition": scene.owned.partition, "rows": rows}
        with psycopg.connect(system.dsn, autocommit=True) as connection:
            for text in (KEYS_OF_LP, MESSAGES_OF_LP):
                connection.execute(text.encode(), facts)
            if analyzed:
                connection.execute("ANALYZE mqlayer.parked_key, mqlayer.parked_message")
        read[rows] = scene.read("end 10", partial(end_ten, scene, facts))
        scene.database.close()
    assert 0 < read[5_000].pages <= read[200].pages + 60, read


def end_ten(scene: Scene, facts: dict[str, int]) -> None:
    numbers = range(11, 21)
    arrays = {"lps": [LP] * 10, "names": [f"key-{n}".encode() for n in numbers], "sources": [1] * 10}
    asked = facts | arrays | {"seqs": list(numbers), "handled": [True] * 10, "given_s": 0.0, "member_id": "m"}
    with scene.database.connection() as connection, connection.transaction(force_rollback=True):
        connection.execute(query("parked_messages_end"), asked)


def test_each_act_can_be_read(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench asks the queries of today: one that needs another fact would fail here."""
    monkeypatch.setattr("bench.filled.ROUNDS", 1)
    scene = Scene(system)
    scene.fill(dict.fromkeys(("outbox", "fence", "parked"), FEW))
    assert all(reading.pages for reading in scene.readings().values())
    scene.database.close()
