"""What a run that does not settle says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis
from pydantic import SecretStr

from mqlayer.domain.routing import lp_of
from mqlayer.postgres.database import Database
from mqlayer.redis.keys import partition_keys
from mqlayer.relay import relay_once
from mqlayer.runtime.route_cache import load_route
from mqlayer.settings import Settings
from tests.chaos.actors import GROUP, INTO_SINK, MIRROR, SINK, TOPIC
from tests.chaos.harness.scene import Scene
from tests.fixtures.servers import StartRedis
from tests.proof.route_ranges import range_of


@pytest.fixture
def connection(database_dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def scene(
    connection: psycopg.Connection, database_dsn: str, key_prefix: str, start_redis: StartRedis, tmp_path: Path
) -> Iterator[Scene]:
    connection.execute(SINK)
    with Database(database_dsn) as database:
        settings = Settings(dsn=SecretStr(database_dsn), key_prefix=key_prefix)
        yield Scene(database, [start_redis()], settings, tmp_path)


def test_it_says_which_lps_have_no_effect_and_which_partitions_nobody_consumes(
    scene: Scene, connection: psycopg.Connection
) -> None:
    route = load_route(scene.database, TOPIC)
    lps = sorted(lp_of(key.encode()) for key in ("a", "b"))
    first, second = (f"LP {lp} of partition {range_of(route, lp).partition}: 1 of 1 have no effect" for lp in lps)
    for key in ("a", "b"):
        connection.execute("SELECT mqlayer_app.publish_v1(%s, %s, '')", (TOPIC, key))
    assert list(scene.without_effect(limit=10)) == [first, second]
    assert list(scene.without_effect(limit=1)) == [first, "and more"]
    with pytest.raises(AssertionError, match="2 messages have no effect"):
        scene.is_settled()
    facts = {"key": "a", "source": 1, "seq": 1, "epoch": 1, "partition": 1, "value": ""}
    connection.execute(INTO_SINK, facts | {"lp": lps[0]})
    assert list(scene.without_effect(limit=1)) == [second]

    for group in (GROUP, MIRROR):
        connection.execute(
            "INSERT INTO mqlayer.consumer_group (topic_id, name, start, backoff_s) VALUES (1, %s, 'earliest', '{1}')",
            (group,),
        )
    connection.execute(
        "INSERT INTO mqlayer.assignment (group_id, partition_id, epoch) VALUES (1, 2, nextval('mqlayer.epoch'))"
    )
    assert list(scene.unowned()) == [f"group {GROUP} has nobody for partition 2 (open, on n0)"]
    redis.Redis.from_url(scene.nodes[0].url).hset(partition_keys(scene.prefix, 2).meta, "next", "5")
    assert f"group {MIRROR} is at 0 of 5 in partition 2" in list(scene.unsettled())


def test_a_run_is_not_settled_while_a_partition_lacks_what_its_node_lost(
    scene: Scene, connection: psycopg.Connection
) -> None:
    """One group has handled it; the other one will, once a relay has sent it again."""
    lp = lp_of(b"a")
    partition = range_of(load_route(scene.database, TOPIC), lp).partition
    for _ in range(2):
        connection.execute("SELECT mqlayer_app.publish_v1(%s, 'a', '')", (TOPIC,))
    assert relay_once(scene.settings) == 2
    assert list(scene.not_stored()) == []
    redis.Redis.from_url(scene.nodes[0].url).hset(partition_keys(scene.prefix, partition).marks, f"1:{lp}", "1")
    assert list(scene.not_stored()) == [f"partition {partition} lacks messages of LPs [{lp}]"]
    assert next(scene.unsettled()) == f"partition {partition} lacks messages of LPs [{lp}]"


def test_a_partition_of_which_more_than_a_tombstone_is_left_is_named(
    scene: Scene, connection: psycopg.Connection
) -> None:
    assert list(scene.leftovers()) == []
    connection.execute("ALTER TABLE mqlayer.partition DISABLE TRIGGER USER")
    connection.execute("UPDATE mqlayer.partition SET state = 'deleted' WHERE partition_id = 2")
    redis.Redis.from_url(scene.nodes[0].url).set(f"{scene.prefix}:{{2}}:stray", "")
    told = " ".join(scene.leftovers())
    assert "partitions that are open: [1, 3, 4], not [1, 2, 3, 4]" in told
    assert "partition 2 is deleted, and its nodes hold {" in told
    assert "'stray': 'string'" in told
