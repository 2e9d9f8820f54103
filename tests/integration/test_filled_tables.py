"""Acts of owners and operators on parked keys read those keys, however many others are parked: what the bench reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from bench.filled import Scene
from bench.stage import System
from mqlayer.postgres.database import Database
from mqlayer.settings import Settings
from mqlayer.topics import create_topic, register_node
from tests.fixtures.servers import StartRedis
from tests.proof.runtimes import runtime_of

FEW, MANY = 1_000, 4_000
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


def test_each_act_can_be_read(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench asks the queries of today: one that needs another fact would fail here."""
    monkeypatch.setattr("bench.filled.ROUNDS", 1)
    scene = Scene(system)
    scene.fill(dict.fromkeys(("outbox", "fence", "parked"), FEW))
    assert all(reading.pages for reading in scene.readings().values())
    scene.database.close()
