"""Marks of direct producers that ended go, by what Postgres says; others stay."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from mqlayer.postgres.database import Database
from mqlayer.redis.keys import partition_keys
from mqlayer.trimming import drop_closed_marks
from tests.fixtures.servers import StartRedis
from tests.proof.producer_world import ProducerWorld

PROGRAM = (
    "import sys; from mqlayer.postgres.database import Database; from mqlayer.trimming import drop_closed_marks; "
    "drop_closed_marks(Database(sys.argv[1]), prefix=sys.argv[2], closed_for_s=0)"
)


@pytest.fixture
def world(database_dsn: str, redis_url: str, key_prefix: str) -> ProducerWorld:
    """A topic of two partitions."""
    world = ProducerWorld(database_dsn, key_prefix, [redis_url])
    world.add_topic(partitions=2)
    return world


def sources_with_marks(world: ProducerWorld) -> set[int]:
    found: set[int] = set()
    for r in world.routes["orders"].ranges:
        names: Any = world.client().hkeys(partition_keys(world.prefix, r.partition).marks)
        found |= {int(name.split(b":")[0]) for name in names}
    return found


def dropped(world: ProducerWorld, closed_for_s: float) -> int:
    with Database(world.dsn) as database:
        return drop_closed_marks(database, prefix=world.prefix, closed_for_s=closed_for_s)


def publish(world: ProducerWorld) -> int:
    """Publish with a producer that ends; return its source."""
    with world.producer() as producer:
        receipts = [producer.send("orders", key=f"key-{number}", body=b"x") for number in range(20)]
    return receipts[0].identity.source


def test_marks_of_closed_sources_go_and_the_others_stay(world: ProducerWorld) -> None:
    ended = publish(world)
    with world.producer() as living:
        source = living.send("orders", key="k", body=b"1").identity.source
        assert sources_with_marks(world) == {ended, source}
        assert dropped(world, closed_for_s=3600) == 0, "it may have something on its way"
        assert dropped(world, closed_for_s=0) == 1
        assert sources_with_marks(world) == {source}
        assert dropped(world, closed_for_s=0) == 0
        assert living.send("orders", key="k", body=b"2").identity.seq == 2


def test_a_pass_that_is_killed_before_it_noted_its_work_is_done_again(world: ProducerWorld) -> None:
    publish(world)
    killed = subprocess.run(
        [sys.executable, "-c", PROGRAM, world.dsn, world.prefix],
        env=os.environ | {"MQLAYER_FAILPOINTS": "marks.before_record=kill"},
        check=False,
    )
    assert killed.returncode == -9
    assert dropped(world, closed_for_s=0) == 1
    assert sources_with_marks(world) == set()


def test_sources_wait_for_a_node_that_is_away(
    database_dsn: str, redis_url: str, start_redis: StartRedis, key_prefix: str
) -> None:
    away = start_redis()
    world = ProducerWorld(database_dsn, key_prefix, [redis_url, away.url])
    world.add_topic(partitions=2)
    publish(world)
    away.stop()
    assert dropped(world, closed_for_s=0) == 0
    assert world.rows("SELECT 1 FROM mqlayer.source WHERE dropped_at IS NULL")
