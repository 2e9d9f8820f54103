"""A publisher whose user may add records and not say so: verify names them, arming and the next append count them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
import redis

from mqlayer.doctor.findings import CheckStatus
from mqlayer.doctor.verify import verify
from mqlayer.domain.routing import NodeId
from mqlayer.postgres.database import Database
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.partition_scripts import AppendReply, MessageRun, RunOutcome, append_command, append_reply
from mqlayer.stack import RedisServer
from mqlayer.topics import create_topic, register_node
from mqlayer.topics.nodes import rearm_node
from tests.proof.runtimes import runtime_of

SOURCE = 3
PASSWORD = "cut"


@pytest.fixture
def connection(every_redis: RedisServer) -> Iterator[NodeConnection]:
    with NodeConnection(Node(NodeId(1), "n1", every_redis.url, None), any_run=True) as connection:
        yield connection


@pytest.mark.parametrize("repair", ["append", "rearm"])
def test_records_that_a_user_without_hset_appended_are_counted(
    connection: NodeConnection, database_dsn: str, key_prefix: str, repair: str
) -> None:
    run = MessageRun(5, 1, 3, [b"1", b"k", b"b"] * 3)
    with Database(database_dsn) as database:
        register_node(runtime_of(database), name="n1", url=connection.node.url)
        (home,) = create_topic(runtime_of(database, key_prefix), "orders", partitions=1).ranges
        command = append_command(connection, key_prefix, home.partition, SOURCE, [run])
        user = f"cut-{key_prefix}"
        connection.call([("ACL", "SETUSER", user, "on", f">{PASSWORD}", "~*", "+@all", "-hset")])
        try:
            with redis.Redis.from_url(connection.node.url, username=user, password=PASSWORD) as cut:
                for _ in range(2):
                    with suppress(redis.ResponseError):
                        cut.execute_command(*command)
        finally:
            connection.call([("ACL", "DELUSER", user)])
        found = [one for one in verify(runtime_of(database, key_prefix, application=database), "orders")
                 if one.verdict is CheckStatus.BROKEN]  # fmt: skip
        assert any("a call ended in its middle" in one.seen for one in found)
        assert all("node rearm" in one.fix for one in found)
        if repair == "rearm":
            rearm_node(runtime_of(database, key_prefix), "n1")
        answer = append_reply(connection.call([command])[0], "")
        assert answer == AppendReply(4, [RunOutcome("dup", 0, 3)])
        keys = partition_keys(key_prefix, home.partition)
        assert connection.call([("XLEN", keys.log), ("HGET", keys.meta, "next")]) == [3, b"4"]
        after = verify(runtime_of(database, key_prefix, application=database), "orders", deep=True)
        assert [one for one in after if one.verdict is CheckStatus.BROKEN] == []
