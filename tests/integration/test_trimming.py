"""Trimming drops what every group has settled, and nothing else (invariant 10)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from mqlayer.domain.routing import Route
from mqlayer.maintenance import trim_pass
from mqlayer.postgres.database import Database
from mqlayer.redis.keys import group_keys, partition_keys
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import GroupStart, MessageRun, trim_command
from mqlayer.stack import RedisServer
from mqlayer.topics import create_topic, list_nodes, register_node
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.partition_harness import PartitionHarness
from tests.fixtures.variants import some_of
from tests.proof.runtimes import runtime_of

COUNT = 400


class Stream:
    """A topic of one partition with some records, and groups that settle them."""

    def __init__(self, database: Database, server: RedisServer, prefix: str) -> None:
        register_node(runtime_of(database), name="n1", url=server.url)
        self.route: Route = create_topic(runtime_of(database, prefix), "orders", partitions=1)
        self.database, self.prefix, self.partition = database, prefix, self.route.ranges[0].partition
        self.connection = NodeConnection(list_nodes(database)[0])
        self.client = redis.Redis.from_url(server.url)
        fields = [field for _ in range(COUNT) for field in (b"0", b"k", b"x" * 100)]
        PartitionHarness(self.connection, prefix, self.partition).append(MessageRun(5, 1, COUNT, fields), source=1)

    def group(self, start: str = "earliest", at: int = 1) -> int:
        """Create a group that starts at an offset."""
        with kept_session(self.database.dsn) as connection:
            row = connection.execute(
                "INSERT INTO mqlayer.consumer_group (topic_id, name, start, state, backoff_s) "
                "SELECT 1, 'g' || count(*), %s, 'live', '{1}' FROM mqlayer.consumer_group RETURNING group_id",
                (start,),
            ).fetchone()
            group_id = row[0] if row else 0
            connection.execute("INSERT INTO mqlayer.group_start VALUES (%s, %s, %s)", (group_id, self.partition, at))
        return int(group_id)

    def settle(self, group_id: int, first: int, last: int) -> None:
        """Have a group settle a range."""
        member = PartitionHarness(self.connection, self.prefix, self.partition, group_id=group_id).member("m", 1)
        member.acquire()
        member.settle([(first, last)])

    def first(self) -> int:
        """The lowest offset that is there."""
        entries: Any = self.client.xrange(partition_keys(self.prefix, self.partition).log, count=1)
        return int(entries[0][0].split(b"-")[0])

    def trim(self) -> None:
        """Run the pass that Celery and the command run."""
        trim_pass(runtime_of(self.database, self.prefix))


@pytest.fixture
def stream(database_dsn: str, every_redis: RedisServer, key_prefix: str) -> Iterator[Stream]:
    with Database(database_dsn) as database:
        stream = Stream(database, every_redis, key_prefix)
        yield stream
        stream.connection.close()


def test_a_topic_without_groups_keeps_everything(stream: Stream) -> None:
    stream.trim()
    assert stream.first() == 1


def test_the_slowest_group_bounds_what_is_dropped(stream: Stream) -> None:
    fast, slow = stream.group(), stream.group()
    stream.settle(fast, 1, COUNT)
    stream.trim()
    assert stream.first() == 1, "the slow group has settled nothing"
    stream.settle(slow, 1, 250)
    stream.trim()
    assert 1 < stream.first() <= 251


def test_a_message_settled_above_an_unsettled_one_does_not_count(stream: Stream) -> None:
    group = stream.group()
    stream.settle(group, 200, COUNT)
    stream.trim()
    assert stream.first() == 1


def test_a_group_that_starts_later_bounds_by_its_start(stream: Stream) -> None:
    stream.group("latest", at=300)
    stream.trim()
    assert 1 < stream.first() <= 300


def test_a_pass_looks_at_no_more_than_it_is_told_and_never_past_a_floor(stream: Stream) -> None:
    group = stream.group()
    stream.settle(group, 1, COUNT)
    command = trim_command(
        stream.connection, stream.prefix, stream.partition, [GroupStart(group, 0, 1)], floor=150, limit=10_000
    )
    word, _, first, expired = stream.connection.call([command])[0]
    assert (word, expired) == (b"trimmed", 0)
    assert first == stream.first() <= 150


def test_a_sealed_partition_that_never_had_a_record_begins_at_its_first_offset(stream: Stream) -> None:
    """Were it 0, where its command is, `mqlayer verify` would miss a record."""
    empty = PartitionHarness(stream.connection, stream.prefix, stream.partition + 1)
    empty.create()
    empty.seal()
    assert empty.trim(1, start=1) == [b"trimmed", 0, 1, 0]
    assert empty.call(("HMGET", empty.keys.meta, "first", "next")) == [[b"1", b"1"]]


def test_trimming_a_partition_that_is_not_there_makes_nothing(stream: Stream) -> None:
    command = trim_command(stream.connection, stream.prefix, 10**6, [], floor=100, limit=100)
    assert stream.connection.call([command]) == [[b"absent"]]
    assert not stream.client.exists(group_keys(stream.prefix, 10**6, 1).lock)


@pytest.mark.parametrize("place", some_of(["trim.after_work", "trim.after_round"], 2))
def test_a_pass_that_is_killed_half_way_is_done_by_the_next(stream: Stream, place: str) -> None:
    """Between two rounds nothing is owed: what was dropped was settled by all."""
    group = stream.group()
    stream.settle(group, 1, 350)
    program = (
        "import sys; from mqlayer.postgres.database import Database; from mqlayer.maintenance import trim_pass; "
        "from mqlayer.runtime import Runtime; from mqlayer.settings import Settings; "
        "trim_pass(Runtime(Database(sys.argv[1]), Settings(key_prefix=sys.argv[2])))"
    )
    killed = ask_python("-c", program, stream.database.dsn, stream.prefix, env=os.environ | armed(f"{place}=kill"))
    assert killed.returncode == -9
    stream.trim()
    assert 1 < stream.first() <= 351
