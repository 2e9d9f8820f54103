"""Marks of direct producers that ended go, by what Postgres says; others stay."""

from __future__ import annotations

import os
from typing import Any

import redis

from mqlayer.domain.routing import NodeId
from mqlayer.maintenance import drop_closed_marks
from mqlayer.maintenance.marks_cleanup import FIELDS_PER_COMMAND, SOURCES_PER_PASS, PartitionLps, drop_commands
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.topics import rearm_node
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.servers import StartRedis
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

PROGRAM = (
    "import sys; from mqlayer.postgres.database import Database; from mqlayer.maintenance import drop_closed_marks; "
    "from mqlayer.runtime import Runtime; from mqlayer.settings import Settings; "
    "drop_closed_marks(Runtime(Database(sys.argv[1]), Settings(key_prefix=sys.argv[2])), closed_for_s=0)"
)


def sources_with_marks(world: World) -> set[int]:
    found: set[int] = set()
    for r in world.routes["orders"].ranges:
        names: Any = world.client().hkeys(partition_keys(world.key_prefix, r.partition).marks)
        # Where no mark would be left, one of source 0 stays, which says nothing.
        found |= {int(name.split(b":")[0]) for name in names} - {0}
    return found


def dropped(world: World, closed_for_s: float) -> int:
    return drop_closed_marks(runtime_of(world.database, world.key_prefix), closed_for_s=closed_for_s)


def publish(world: World) -> int:
    """Publish with a producer that ends; return its source."""
    with world.producer() as producer:
        receipts = [producer.send("orders", key=f"key-{number}", body=b"x") for number in range(20)]
    return receipts[0].identity.source


def test_marks_of_closed_sources_go_and_the_others_stay(world: World) -> None:
    ended = publish(world)
    with world.producer() as living:
        source = living.send("orders", key="k", body=b"1").identity.source
        assert sources_with_marks(world) == {ended, source}
        assert dropped(world, closed_for_s=3600) == 0, "it may have something on its way"
        assert dropped(world, closed_for_s=0) == 1
        assert sources_with_marks(world) == {source}
        assert dropped(world, closed_for_s=0) == 0
        assert living.send("orders", key="k", body=b"2").identity.seq == 2


def test_a_pass_that_is_killed_before_it_noted_its_work_is_done_again(world: World) -> None:
    publish(world)
    killed = ask_python("-c", PROGRAM, world.dsn, world.key_prefix, env=os.environ | armed("marks.before_record=kill"))
    assert killed.returncode == -9
    assert dropped(world, closed_for_s=0) == 1
    assert sources_with_marks(world) == set()


def test_sources_wait_for_a_node_that_is_away(
    database_dsn: str, redis_url: str, start_redis: StartRedis, key_prefix: str
) -> None:
    away = start_redis()
    world = World(database_dsn, key_prefix, [redis_url, away.url])
    world.add_topic(partitions=2)
    publish(world)
    away.stop()
    assert dropped(world, closed_for_s=0) == 0
    assert world.rows("SELECT 1 FROM mqlayer.source WHERE dropped_at IS NULL")


def test_a_node_that_is_away_keeps_no_source_from_being_cleaned_on_the_others(
    database_dsn: str, redis_url: str, start_redis: StartRedis, key_prefix: str
) -> None:
    """More sources than a pass takes: each gets its turn, and is done when the node is back."""
    away = start_redis()
    world = World(database_dsn, key_prefix, [away.url, redis_url])
    [_, here] = world.add_topic(partitions=2).ranges
    rows = world.rows(
        "INSERT INTO mqlayer.source (kind, name, closed_at) "
        "SELECT 'direct', 'p', now() - interval '1 day' FROM generate_series(1, %s) RETURNING source_id",
        SOURCES_PER_PASS + 5,
    )
    marks = partition_keys(key_prefix, here.partition).marks
    with redis.Redis.from_url(redis_url) as client:
        client.hset(marks, mapping={f"{source}:{lp}": 1 for (source,) in rows for lp in (512, 1023)})
        away.stop()
        assert dropped(world, closed_for_s=0) == 0
        assert client.hlen(marks) == 2 * 5
        assert dropped(world, closed_for_s=0) == 0
        assert client.hgetall(marks) == {b"0:%d" % here.lp_from: b"0"}
    assert world.rows("SELECT count(*)::int FROM mqlayer.source WHERE dropped_at IS NULL") == [(SOURCES_PER_PASS + 5,)]
    away.start()
    rearm_node(runtime_of(world.database, key_prefix), "node-1")
    assert [dropped(world, closed_for_s=0) for _ in range(3)] == [SOURCES_PER_PASS, 5, 0]


def test_no_command_removes_more_than_some_thousands_of_marks(redis_url: str) -> None:
    """A node does nothing else meanwhile."""
    with NodeConnection(Node(NodeId(1), "n", redis_url, None), any_run=True) as line:
        commands = list(drop_commands(line, "mq", [1, 2, 3], [PartitionLps(1, 0, 1024), PartitionLps(2, 0, 10)]))
    assert [len(command) - 5 for command in commands] == [FIELDS_PER_COMMAND, 3 * 1024 - FIELDS_PER_COMMAND, 30]
    names = {name for _, _, _, meta, _, *names in commands for name in names if b"{1}" in meta}
    assert names == {b"%d:%d" % (source, lp) for source in (1, 2, 3) for lp in range(1024)}
