"""What the scripts on the publishing side answer, path by path, on every Redis on this machine.

Those on the consuming side: tests/property/test_consumer_scripts.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from mqlayer.domain.routing import NodeId
from mqlayer.errors import NodeOutOfMemory, StoreUnavailable
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Node, NodeConnection, is_missing_script
from mqlayer.redis.partition_scripts import (
    AppendReply,
    MessageRun,
    Refused,
    RunOutcome,
    Sealed,
    append_command,
    append_reply,
    brief_seal_command,
    create,
    ends_command,
    ends_reply,
    seal_command,
    seal_reply,
    skip_marks_command,
)
from mqlayer.redis.scripts import script_texts
from mqlayer.stack import RedisServer
from tests.fixtures.servers import StartRedis

SOURCE = 5


class Partition:
    """One partition that serves LPs 10 to 19, and a connection to its node."""

    def __init__(self, url: str, prefix: str) -> None:
        self.connection = NodeConnection(Node(NodeId(1), "n", url, None), any_run=True)
        self.prefix, self.number = prefix, 1
        self.keys = partition_keys(prefix, self.number)

    def create(self, state: str = "open", change: str = "", lp_to: int = 20) -> str:
        return create(self.connection, self.prefix, self.number, "orders", 10, lp_to, state, change)

    def append(self, *runs: MessageRun, backlog: int = 0) -> AppendReply | Refused:
        return append_reply(self.call(*runs, backlog=backlog), "the node")

    def call(self, *runs: MessageRun, backlog: int = 0) -> Any:
        command = append_command(self.connection, self.prefix, self.number, SOURCE, runs, backlog=backlog)
        return self.connection.call([command])[0]

    def records(self) -> list[tuple[bytes, bytes]]:
        (entries,) = self.connection.call([("XRANGE", self.keys.log, "-", "+")])
        return [(entry_id, fields[1]) for entry_id, fields in entries]

    def meta(self) -> dict[bytes, bytes]:
        (flat,) = self.connection.call([("HGETALL", self.keys.meta)])
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def mark(self, lp: int) -> bytes | None:
        (mark,) = self.connection.call([("HGET", self.keys.marks, f"{SOURCE}:{lp}")])
        return mark if mark is None else bytes(mark)


@pytest.fixture
def partition(every_redis: RedisServer, key_prefix: str) -> Iterator[Partition]:
    """A partition that is not made yet, on each version."""
    partition = Partition(every_redis.url, key_prefix)
    yield partition
    partition.connection.close()


def run(lp: int, first: int, count: int = 1) -> MessageRun:
    """Return a run whose bodies tell its messages apart."""
    fields = [field for number in range(count) for field in (b"1700000000000", b"k", b"%d/%d" % (lp, first + number))]
    return MessageRun(lp, first, count, fields)


def test_appended_whole(partition: Partition) -> None:
    partition.create()
    assert partition.append(run(10, 1, 2), run(19, 1)) == AppendReply(1, None)
    assert partition.append(run(10, 3)) == AppendReply(4, None)
    assert partition.records() == [
        (b"1-0", b"5:10:1:1700000000000"),
        (b"2-0", b"5:10:2:1700000000000"),
        (b"3-0", b"5:19:1:1700000000000"),
        (b"4-0", b"5:10:3:1700000000000"),
    ]
    assert (partition.mark(10), partition.mark(19), partition.meta()[b"next"]) == (b"3", b"1", b"5")


def test_a_run_that_is_there_is_skipped_and_its_rest_appended(partition: Partition) -> None:
    partition.create()
    partition.append(run(10, 1, 3))
    assert partition.append(run(10, 1, 3)) == AppendReply(4, [RunOutcome("dup", 0, 3)])
    assert partition.append(run(10, 2, 4)) == AppendReply(4, [RunOutcome("dup", 2, 5)])
    assert [m.split(b":")[2] for _, m in partition.records()] == [b"1", b"2", b"3", b"4", b"5"]


def test_a_run_behind_a_hole_is_refused_with_the_mark_and_leaves_the_others_alone(partition: Partition) -> None:
    partition.create()
    partition.append(run(10, 1, 2))
    outcome = partition.append(run(10, 4), run(11, 1), run(12, 2))
    assert outcome == AppendReply(3, [RunOutcome("gap", 0, 2), RunOutcome("ok", 1, 1), RunOutcome("gap", 0, 0)])
    assert len(partition.records()) == 3
    assert partition.mark(12) is None


@pytest.mark.parametrize("lp", [9, 20, 1023])
def test_an_lp_that_is_not_served_here_is_refused_and_leaves_the_others_alone(partition: Partition, lp: int) -> None:
    partition.create()
    outcome = partition.append(run(lp, 1), run(10, 1))
    assert outcome == AppendReply(1, [RunOutcome("unowned", 0, 0), RunOutcome("ok", 1, 1)])
    assert partition.mark(lp) is None


def test_without_a_meta_nothing_is_made(partition: Partition) -> None:
    """Invariant 4: absent means refuse, never new."""
    assert partition.append(run(10, 1)) == Refused("absent", "")
    assert partition.connection.call([("EXISTS", *vars_of(partition))]) == [0]


def test_on_request_a_seal_says_nothing_of_the_marks(partition: Partition) -> None:
    partition.create()
    partition.append(run(10, 1))
    where = (partition.connection, partition.prefix, partition.number, 12)
    for name in ("first", "second"):
        brief = seal_reply(partition.connection.call([brief_seal_command(*where, name)])[0], "the node")
        assert brief == Sealed("first", 2, {})
    assert seal_reply(partition.connection.call([seal_command(*where, "third")])[0], "the node") == Sealed(
        "first", 2, {f"{SOURCE}:10": 1}
    )


@pytest.mark.parametrize("state", ["sealed", "importing"])
def test_a_partition_that_is_not_open_refuses_and_names_the_change(partition: Partition, state: str) -> None:
    """Case 5."""
    if state == "sealed":
        partition.create()
        command = seal_command(partition.connection, partition.prefix, partition.number, 12, "the seal")
        assert isinstance(seal_reply(partition.connection.call([command])[0], "the node"), Sealed)
    else:
        partition.create(state, "12")
    before = partition.records()
    assert partition.append(run(10, 1)) == Refused(state, "12")
    assert partition.records() == before


def test_a_partition_at_its_backlog_limit_refuses_whole_calls(partition: Partition) -> None:
    partition.create()
    partition.append(run(10, 1, 3))
    assert partition.append(run(10, 4), backlog=3) == Refused("full", "3")
    assert partition.append(run(10, 4), backlog=4) == AppendReply(4, None)


def test_more_than_500_messages_or_runs_are_refused(partition: Partition) -> None:
    partition.create()
    assert partition.append(run(10, 1, 500)) == AppendReply(1, None)
    assert partition.append(run(10, 501, 501)) == Refused("too_large", "501")
    assert isinstance(partition.append(*(run(lp, 1, 0) for lp in range(501))), Refused)
    assert len(partition.records()) == 500


def test_counts_that_do_not_match_the_messages_are_an_error_and_change_nothing(partition: Partition) -> None:
    partition.create()
    for wrong in (MessageRun(10, 1, 2, run(10, 1).fields), MessageRun(10, 1, 1, run(10, 1, 2).fields)):
        with pytest.raises(StoreUnavailable, match="counts do not match"):
            partition.append(wrong)
    assert not partition.records()


def test_a_partition_is_made_once(partition: Partition) -> None:
    assert partition.create() == "created"
    partition.append(run(10, 1))
    assert partition.create() == "unchanged"
    assert partition.create(lp_to=30) == "conflict"
    assert partition.create(change="8") == "conflict"
    assert partition.meta() == {
        b"state": b"open", b"topic": b"orders", b"lp_from": b"10", b"lp_to": b"20", b"change": b"", b"next": b"2",
        b"first": b"1",
    }  # fmt: skip


def test_a_flushed_script_cache_is_its_own_error_and_nothing_was_done(partition: Partition) -> None:
    partition.create()
    connection = partition.connection
    connection.call([("SCRIPT", "FLUSH")])
    command = append_command(connection, partition.prefix, partition.number, SOURCE, (run(10, 1),), backlog=0)
    assert is_missing_script(connection.call_once([command])[0])
    assert partition.records() == []
    connection.reload_scripts()
    assert partition.append(run(10, 1)) == AppendReply(1, None)


def test_connections_send_scripts_to_a_run_once_and_again_after_it_forgot_them(partition: Partition) -> None:
    partition.create()
    command = ends_command(partition.connection, partition.prefix, partition.number)
    with NodeConnection(partition.connection.node, any_run=True) as second:
        before = loads(second)
        assert ends_reply(second.call([command])[0], "the node").next_offset == 1
    with NodeConnection(partition.connection.node, any_run=True) as third:
        assert loads(third) == before
        third.call([("SCRIPT", "FLUSH")])
        assert is_missing_script(third.call_once([command])[0])
    with NodeConnection(partition.connection.node, any_run=True) as fourth:
        assert ends_reply(fourth.call_once([command])[0], "the node").next_offset == 1


def loads(connection: NodeConnection) -> int:
    """Return how many scripts a server was given."""
    info = connection.call([("INFO", "commandstats")])[0].decode()
    # Before Redis 7, it counts all of SCRIPT.
    return sum(int(calls) for calls in re.findall(r"cmdstat_script(?:\|load)?:calls=(\d+)", info))


def test_a_script_that_alone_is_missing_in_the_middle_of_a_write_is_repeated_behind_the_others(
    partition: Partition,
) -> None:
    """Each command runs once, and each reply stands in its command's place."""
    partition.create()
    connection, number = partition.connection, partition.number
    append, ends = (
        append_command(connection, partition.prefix, number, SOURCE, (run(10, 1),), backlog=0),
        ends_command(connection, partition.prefix, number),
    )
    texts = script_texts(connection.connect().version)
    connection.call([("SCRIPT", "FLUSH"), ("SCRIPT", "LOAD", texts["log_ends"])])
    before, appended, after, length = connection.call([ends, append, ends, ("XLEN", partition.keys.log)])
    assert append_reply(appended, "the node") == AppendReply(1, None)
    assert [ends_reply(reply, "the node").next_offset for reply in (before, after)] == [1, 1]
    assert length == 0, "it ran behind what stood behind it"
    assert [m for m, _ in partition.records()] == [b"1-0"]
    connection.call([("SCRIPT", "FLUSH")])
    again = connection.call([append, ends])
    assert append_reply(again[0], "the node") == AppendReply(2, [RunOutcome("dup", 0, 1)])
    assert ends_reply(again[1], "the node").next_offset == 2


def test_appending_does_not_run_when_memory_is_out(
    start_redis: StartRedis, every_redis: RedisServer, key_prefix: str
) -> None:
    server = start_redis(program=every_redis.program)
    partition = Partition(server.url, key_prefix)
    partition.create()
    partition.append(run(10, 1))
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 100_000)
        with pytest.raises(NodeOutOfMemory):
            partition.append(run(10, 2))
        client.config_set("maxmemory", 0)
    assert partition.append(run(10, 2)) == AppendReply(2, None)
    partition.connection.close()


def vars_of(partition: Partition) -> tuple[bytes, bytes, bytes]:
    """Return all keys of a partition."""
    return partition.keys.log, partition.keys.meta, partition.keys.marks


def test_seqs_are_passed_by_once_and_only_from_the_mark_that_was_looked_at(partition: Partition) -> None:
    """Whoever comes late lowers no mark and counts nothing again."""
    partition.create()
    pass_by = [skip_marks_command(partition.connection, partition.prefix, partition.number, SOURCE, 12, *seqs)
               for seqs in ((0, 4), (0, 4), (4, 6), (0, 4))]  # fmt: skip
    answers = [partition.connection.call([command])[0] for command in pass_by]
    assert answers == [[b"skipped", 4], [b"moved", 4], [b"skipped", 6], [b"moved", 6]]
    assert partition.meta()[b"lost"] == b"6"
    assert partition.append(MessageRun(12, 7, 1, [b"1700000000000", b"k", b"b"])) == AppendReply(1, None)
    assert partition.connection.call([pass_by[0]])[0] == [b"moved", 7]
