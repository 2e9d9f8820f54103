"""The scripts of shared groups do what a plain model of one partition and one group does, on every Redis here.

Cases 50 to 54 as far as they go without order: committed is the first offset that is not settled, whoever settles what
in whatever order; nothing is given to two members at a time, and nothing is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mqlayer.domain.message import records_of
from mqlayer.domain.offsets import as_ranges
from mqlayer.domain.routing import NodeId
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.partition_scripts import Fenced, Refused, create, fence_command
from mqlayer.redis.read_scripts import position_command, position_reply
from mqlayer.redis.shared_scripts import (
    DueMessages,
    EpochInForce,
    SharedGroupPartition,
    SharedSettled,
    shared_acquire_command,
    shared_acquire_reply,
    shared_count_reply,
    shared_due_command,
    shared_due_reply,
    shared_extend_command,
    shared_extend_reply,
    shared_nack_command,
    shared_read_command,
    shared_reclaim_command,
    shared_settle_command,
    shared_settle_reply,
)
from mqlayer.stack import RedisServer

GROUP = 7
MEMBERS = ("a", "b", "c")
members = st.sampled_from(MEMBERS)
_partitions = itertools.count(1)


class SharedScripts(RuleBasedStateMachine):
    """Members that read, settle, give back and vanish, beside appends and arming."""

    connection: NodeConnection
    prefix: str

    def __init__(self) -> None:
        super().__init__()
        self.partition = next(_partitions)
        self.keys = partition_keys(self.prefix, self.partition)
        create(self.connection, self.prefix, self.partition, "t", 0, 1024, "open", "")
        self.epoch = self.next = 1
        # Offset -> who has it, "-" for nobody; what is not here and was read is settled.
        self.out: dict[int, str] = {}
        self.read_upto = 1
        self.take()

    def place(self, epoch: int | None = None) -> SharedGroupPartition:
        return SharedGroupPartition(self.prefix, self.partition, GROUP, epoch or self.epoch)

    def ask(self, command: object) -> object:
        return self.connection.call([command])[0]  # type: ignore[list-item]

    def take(self) -> None:
        answer = shared_acquire_reply(self.ask(shared_acquire_command(self.connection, self.place(), afresh=True)), "")
        assert isinstance(answer, EpochInForce)
        assert (answer.committed, answer.newly_acquired) == (self.committed, True)

    @property
    def committed(self) -> int:
        """The first offset that is not settled."""
        return min([*self.out, self.read_upto])

    @rule(count=st.sampled_from([1, 2, 5, 12]))
    def append(self, count: int) -> None:
        new = range(self.next, self.next + count)
        self.next += count
        adds = [("XADD", self.keys.log, f"{o}-0", "m", f"1:0:{o}:0", "k", "k", "b", "b") for o in new]
        self.connection.call([*adds, ("HSET", self.keys.meta, "next", self.next)])

    @rule(member=members, count=st.integers(1, 8))
    def read(self, member: str, count: int) -> None:
        command = shared_read_command([self.place()], member, group_id=GROUP, count=count, block_ms=0)
        found = self.connection.call([command])[0]
        offsets = [record.offset for record in records_of(found[0][1])] if found else []
        assert offsets == list(range(self.read_upto, min(self.next, self.read_upto + count)))
        self.out |= dict.fromkeys(offsets, member)
        self.read_upto += len(offsets)

    @rule(member=members, data=st.data(), old=st.booleans())
    def settle(self, member: str, data: st.DataObject, old: bool) -> None:
        if self.next == 1:
            return
        offsets = data.draw(st.sets(st.integers(1, self.next - 1), min_size=1, max_size=6))
        epoch = self.epoch - 1 if old else self.epoch
        command = shared_settle_command(self.connection, self.place(epoch or 99), member, as_ranges(offsets))
        answer = shared_settle_reply(self.ask(command), "")
        if old:
            assert answer == Fenced(self.epoch)
            return
        settled = [offset for offset in offsets if self.out.pop(offset, None)]
        # What nobody was given as yet can't be settled.
        assert answer == SharedSettled(self.committed, len(settled))

    @rule(member=members, data=st.data(), failed=st.sampled_from([None, 1, 3]))
    def back(self, member: str, data: st.DataObject, failed: int | None) -> None:
        offsets = data.draw(st.sets(st.integers(1, self.next), min_size=1, max_size=6))
        messages = [(offset, 0, failed) for offset in offsets]
        command = shared_nack_command(self.connection, self.place(), member, messages)
        mine = [offset for offset in offsets if self.out.get(offset) == member]
        assert shared_count_reply(self.ask(command), "") == len(mine)
        self.out |= dict.fromkeys(mine, "-")

    @rule(member=members, limit=st.integers(1, 10))
    def again(self, member: str, limit: int) -> None:
        answer = shared_due_reply(self.ask(shared_due_command(self.connection, self.place(), member, limit)), "")
        assert isinstance(answer, DueMessages)
        offsets = {record.offset for record in answer.records}
        assert offsets <= {offset for offset, who in self.out.items() if who == "-"}
        assert len(offsets) == min(limit, sum(who == "-" for who in self.out.values()))
        self.out |= dict.fromkeys(offsets, member)

    @rule(member=members, data=st.data())
    def keep(self, member: str, data: st.DataObject) -> None:
        offsets = sorted(data.draw(st.sets(st.integers(1, self.next), min_size=1, max_size=6)))
        answer = shared_extend_reply(
            self.ask(shared_extend_command(self.connection, self.place(), member, offsets)), ""
        )
        assert answer == [offset for offset in offsets if self.out.get(offset) != member]

    @rule()
    def reclaim(self) -> None:
        """Of all members: none said that it has anything for 0 ms."""
        held = [offset for offset, who in self.out.items() if who != "-"]
        assert shared_count_reply(self.ask(shared_reclaim_command(self.connection, self.place(), 0)), "") == len(held)
        self.out = dict.fromkeys(self.out, "-")

    @rule()
    def arm(self) -> None:
        self.epoch += 2
        self.connection.call([fence_command(self.connection, self.prefix, self.partition, GROUP, self.epoch)])
        self.take()

    @rule()
    def lose_the_native_group(self) -> None:
        """Somebody destroys it: what is not settled comes again, and so does what was settled above that."""
        committed = self.committed
        self.connection.call([("XGROUP", "DESTROY", self.keys.log, "g7")])
        missing = shared_count_reply(self.ask(shared_reclaim_command(self.connection, self.place(), 0)), "")
        assert missing == Refused("missing", "")
        self.out, self.read_upto = {}, committed
        self.take()

    @invariant()
    def the_look_agrees(self) -> None:
        command = position_command(self.connection, self.prefix, self.partition, GROUP, start=1, seek=0)
        look = position_reply(self.ask(command), "")
        assert look is not None
        assert (look.position, look.unsettled) == (self.committed, self.next - self.read_upto + len(self.out))


@pytest.fixture
def connection(every_redis: RedisServer) -> Iterator[NodeConnection]:
    with NodeConnection(Node(NodeId(1), "n1", every_redis.url, None), any_run=True) as connection:
        yield connection


def test_scripts_and_model_agree(connection: NodeConnection, key_prefix: str) -> None:
    class Here(SharedScripts):
        pass

    Here.connection, Here.prefix = connection, key_prefix
    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_what_was_back_of_a_native_group_that_is_gone_is_not_taken_from_whoever_reads_it(
    connection: NodeConnection, key_prefix: str
) -> None:
    class Here(SharedScripts):
        pass

    Here.connection, Here.prefix = connection, key_prefix
    here = Here()
    here.append(2)
    here.read("a", 2)
    assert shared_count_reply(here.ask(shared_nack_command(connection, here.place(), "a", [(1, 0, 1)])), "") == 1
    here.lose_the_native_group()
    here.read("b", 2)
    here.again("c", 10)
    here.the_look_agrees()
