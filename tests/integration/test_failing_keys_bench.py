"""The benches of failing keys, small: what they measure is there, and a parked key keeps nothing on its node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from bench.failing_keys import healthy_rate, memory_mb
from bench.fill import fill
from bench.stage import System
from mqlayer.postgres.database import Database
from mqlayer.settings import Settings
from mqlayer.topics import create_topic, register_node
from tests.fixtures.servers import StartRedis
from tests.proof.runtimes import runtime_of

COUNT = 8_000


@pytest.fixture
def system(database_dsn: str, key_prefix: str, start_redis: StartRedis) -> Iterator[System]:
    settings, url = Settings(dsn=SecretStr(database_dsn), key_prefix=key_prefix), start_redis().url
    with Database(database_dsn) as database:
        runtime = runtime_of(database, settings=settings, application=database)
        register_node(runtime, name="n1", url=url)
        yield System(runtime, create_topic(runtime, "bench", partitions=2), url)


@pytest.mark.full
@pytest.mark.parametrize("parked", [False, True])
def test_the_stream_of_a_parked_key_is_trimmed_like_any_other(system: System, parked: bool) -> None:
    memory_mb(system, COUNT, parked=parked, stretch=COUNT // 4)
    logs = [key for key in system.client().scan_iter("*") if system.client().type(key) == b"stream"]
    kept: list[int] = [system.client().xlen(key) for key in logs]
    assert len(kept) == len(system.route.ranges)
    assert sum(kept) < COUNT // 10
    [(waiting,)] = rows(system, "SELECT count(*) FROM mqlayer.parked_message")
    assert waiting == (COUNT // 10 if parked else 0)


def test_healthy_keys_are_all_handled_beside_failing_ones(system: System) -> None:
    fill(system, COUNT)
    assert healthy_rate(system, 100, messages=COUNT) > 0


def rows(system: System, sql: str) -> list[tuple[int, ...]]:
    """Return what the database says."""
    with system.database.connection() as connection:
        return connection.execute(sql.encode()).fetchall()
