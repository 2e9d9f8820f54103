"""The scripts of a route change do what a plain model of one partition does, on every Redis on this machine."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from mqlayer.domain.message import pop_command, records_of
from mqlayer.domain.routing import NodeId
from mqlayer.redis.keys import group_keys, partition_keys
from mqlayer.redis.node_connection import Node, NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import (
    MARKS_PER_CALL,
    AppendReply,
    Fenced,
    GroupStart,
    LockHolder,
    LockKept,
    LockTaken,
    MessageRun,
    Refused,
    RunOutcome,
    Sealed,
    acquire_command,
    acquire_reply,
    append_command,
    append_reply,
    create,
    fence_command,
    open_partition,
    reopen_command,
    retire_command,
    seal_command,
    seal_reply,
    settle_command,
    settle_reply,
    trim_command,
)
from mqlayer.stack import RedisServer

GROUP, SOURCE = 7, 3
LP_FROM, LP_TO = 4, 8
BORN_IN = 5
CHANGES = (4, 5, 6, 7, 8)
RACES = 1_000

_partitions = itertools.count(1)


@dataclass
class Model:
    """One partition as a person would write it down; `born` is the change that makes it, 0 for a first route's."""

    state: str | None = None
    born: int = 0
    next: int = 1
    marks: dict[str, int] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    sealed_for: int = 0
    seal_id: str = ""
    epoch: int = 0
    committed: int = 0

    def create(self, born: int) -> str:
        if self.state is None:
            self.state, self.born = "importing" if born else "open", born
            return "created"
        # A tombstone remembers nothing but that it is one.
        return "unchanged" if self.state != "deleted" and self.born == born else "conflict"

    def open(self, change: int, marks: dict[str, int]) -> str:
        if self.state is None:
            return "absent"
        if self.state == "deleted" or self.born != change:
            return "conflict"
        if self.state == "importing":
            self.marks |= marks
            self.state = "open"
        return "open" if self.state == "open" else "conflict"

    def seal(self, change: int, seal_id: str) -> Sealed | Refused:
        if self.state is None:
            return Refused("absent", "")
        if self.state == "sealed" and self.sealed_for == change:
            return Sealed(self.seal_id, self.next, self.marks)
        if self.state != "open":
            return Refused("conflict", self.state)
        self.state, self.sealed_for, self.seal_id = "sealed", change, seal_id
        self.log.append(f"{self.next - 1}-1")
        return Sealed(seal_id, self.next, self.marks)

    def reopen(self, seal_id: str, name: str, mark: int) -> list[bytes]:
        if self.state is None:
            return [b"absent"]
        if self.state != "sealed" or self.seal_id != seal_id or self.marks.get(name, 0) != mark:
            return [b"conflict", self.state.encode()]
        self.state, self.sealed_for, self.seal_id = "open", 0, ""
        self.log.pop()
        return [b"open"]

    def retire(self) -> None:
        self.__init__("deleted")  # type: ignore[misc]

    def append(self, lp: int, first: int, count: int) -> AppendReply | Refused:
        if self.state is None:
            return Refused("absent", "")
        if self.state != "open":
            fact = self.sealed_for if self.state == "sealed" else self.born
            return Refused(self.state, str(fact or ""))
        offset, name = self.next, f"{SOURCE}:{lp}"
        mark = self.marks.get(name, 0)
        if first > mark + 1:
            return AppendReply(offset, [RunOutcome("gap", 0, mark)])
        new = max(0, first + count - 1 - mark)
        self.log += [f"{self.next + number}-0" for number in range(new)]
        self.next += new
        if new:
            self.marks[name] = first + count - 1
        dup = first <= mark
        return AppendReply(offset, [RunOutcome("dup", new, max(mark, first + count - 1))] if dup else None)

    def take(self, epoch: int, start: int) -> LockKept | Fenced | Refused:
        if self.state in (None, "deleted"):
            return Refused("absent", "")
        if epoch < self.epoch:
            return Fenced(self.epoch)
        self.epoch = epoch
        self.committed = self.committed or max(1, min(start, self.next))
        return LockKept(self.committed)

    def settle(self, epoch: int, count: int) -> LockKept | Fenced | Refused:
        if self.state in (None, "deleted"):
            return Refused("absent", "")
        if epoch != self.epoch or not epoch:
            return Fenced(self.epoch)
        if self.committed + count > self.next:
            return Refused("unknown", str(self.next))
        self.committed += count
        return LockKept(self.committed)


class Changes(RuleBasedStateMachine):
    """Steps of several changes, right ones and wrong ones, in any order, beside publishing, consuming and trimming."""

    connection: NodeConnection
    prefix: str

    def __init__(self) -> None:
        super().__init__()
        self.partition = next(_partitions)
        self.keys = partition_keys(self.prefix, self.partition)
        self.model = Model()
        self.seals = itertools.count(1)

    def holder(self, epoch: int) -> LockHolder:
        return LockHolder(self.prefix, self.partition, GROUP, "a", epoch)

    def ask(self, command: Any) -> Any:
        return self.connection.call([command])[0]

    @rule(born=st.sampled_from([0, BORN_IN, BORN_IN]))
    def create(self, born: int) -> None:
        state, change = ("importing", born) if born else ("open", "")
        word = create(self.connection, self.prefix, self.partition, "t", LP_FROM, LP_TO, state, change)
        assert word == self.model.create(born)

    @rule(
        change=st.sampled_from([BORN_IN, BORN_IN, BORN_IN, 4]),
        marks=st.dictionaries(st.integers(LP_FROM, LP_TO - 1), st.integers(1, 9)),
        many=st.booleans(),
    )
    def open(self, change: int, marks: dict[int, int], many: bool) -> None:
        named = {f"{SOURCE}:{lp}": seq for lp, seq in marks.items()}
        if many:
            named |= {f"{source}:{LP_FROM}": 1 for source in range(100, 100 + 2 * MARKS_PER_CALL)}
        word = open_partition(self.connection, self.prefix, self.partition, change, named)
        assert word == self.model.open(change, named)

    @rule(change=st.sampled_from(CHANGES))
    def seal(self, change: int) -> None:
        seal_id = f"seal-{next(self.seals)}"
        reply = self.ask(seal_command(self.connection, self.prefix, self.partition, change, seal_id))
        assert seal_reply(reply, "the node") == self.model.seal(change, seal_id)

    @precondition(lambda self: self.model.state in ("sealed", "open", "deleted"))
    @rule(
        lp=st.integers(LP_FROM, LP_TO - 1),
        count=st.integers(1, 5),
        seal_id=st.sampled_from(["", "", "", "seal-1"]),
        behind=st.sampled_from([0, 0, 0, 1]),
    )
    def reopen(self, lp: int, count: int, seal_id: str, behind: int) -> None:
        """As repairing does: with the append that goes on, or without any effect. Wrong: another seal, another mark."""
        name = f"{SOURCE}:{lp}"
        mark, seal_id = self.model.marks.get(name, 0), seal_id or self.model.seal_id
        run = MessageRun(lp, mark + 1, count, [b"1700000000000", b"k", b"b"] * count)
        reopening = reopen_command(self.connection, self.prefix, self.partition, seal_id, name, mark + behind)
        appending = append_command(self.connection, self.prefix, self.partition, SOURCE, [run])
        opened, appended = self.connection.call([("MULTI",), reopening, appending, ("EXEC",)])[-1]
        assert opened == self.model.reopen(seal_id, name, mark + behind)
        assert append_reply(appended, "the node") == self.model.append(lp, mark + 1, count)

    @rule(sure=st.sampled_from([True, False, False, False, False]))
    def retire(self, sure: bool) -> None:
        if sure:
            reply = self.ask(retire_command(self.connection, self.prefix, self.partition, [GROUP]))
            assert raise_for_reply(reply, "the node") == [b"retired"]
            self.model.retire()

    @rule(lp=st.integers(LP_FROM, LP_TO - 1), begin=st.sampled_from([0, 0, 0, -1, 2]), count=st.integers(1, 5))
    def append(self, lp: int, begin: int, count: int) -> None:
        first = max(1, self.model.marks.get(f"{SOURCE}:{lp}", 0) + 1 + begin)
        run = MessageRun(lp, first, count, [b"1700000000000", b"k", b"b"] * count)
        reply = self.ask(append_command(self.connection, self.prefix, self.partition, SOURCE, [run]))
        assert append_reply(reply, "the node") == self.model.append(lp, first, count)

    @rule(epoch=st.integers(1, 4), start=st.sampled_from([1, 1, 3, 100]))
    def take(self, epoch: int, start: int) -> None:
        reply = self.ask(acquire_command(self.connection, self.holder(epoch), start=start, afresh=True))
        answer = acquire_reply(reply, "the node")
        shown = LockKept(answer.committed) if isinstance(answer, LockTaken) else answer
        assert shown == self.model.take(epoch, start)
        assert not isinstance(answer, LockTaken) or answer.next_offset == self.model.next

    @rule(epoch=st.integers(1, 4), count=st.integers(1, 4))
    def settle(self, epoch: int, count: int) -> None:
        first = self.model.committed
        reply = self.ask(settle_command(self.connection, self.holder(epoch), [(first, first + count - 1)]))
        assert settle_reply(reply, "the node") == self.model.settle(epoch, count)

    @rule(floor=st.sampled_from([2, 5, 2**53]))
    def trim(self, floor: int) -> None:
        command = trim_command(
            self.connection, self.prefix, self.partition, [GroupStart(GROUP, 0, 1)], floor=floor, limit=10_000
        )
        word, *facts = raise_for_reply(self.ask(command), "the node")
        if self.model.state in (None, "deleted"):
            assert word == b"absent"
            return
        assert word == b"trimmed"
        kept = self.model.committed or 1
        assert all(int(entry.split("-")[0]) < kept for entry in self.model.log[: facts[0]])
        del self.model.log[: facts[0]]
        assert self.model.state != "sealed" or self.model.log[-1].endswith("-1")

    @invariant()
    def the_servers_state_is_the_models(self) -> None:
        meta, marks, entries = self.connection.call(
            [("HGETALL", self.keys.meta), ("HGETALL", self.keys.marks), ("XRANGE", self.keys.log, "-", "+")]
        )
        known = dict(zip(meta[::2], meta[1::2], strict=True))
        assert known.get(b"state") == (self.model.state.encode() if self.model.state else None)
        if self.model.state == "deleted":
            assert known.keys() == {b"state"}
            group = group_keys(self.prefix, self.partition, GROUP)
            assert self.ask(("EXISTS", self.keys.log, self.keys.marks, *group)) == 0
            return
        if self.model.state is None:
            assert known == {}
            return
        assert int(known[b"next"]) == self.model.next
        assert {n.decode(): int(m) for n, m in zip(marks[::2], marks[1::2], strict=True)} == self.model.marks
        assert [entry_id.decode() for entry_id, _ in entries] == self.model.log
        command = pop_command(entries)
        assert (command is not None) == (self.model.state == "sealed")
        if command is not None:
            # Invariant 5: it is the last one, it names its seal, and offsets of messages stay dense.
            assert (command.seal_id, command.end) == (self.model.seal_id, self.model.next)
        assert all(record.body == b"b" for record in records_of(entries))


@pytest.fixture
def connection(every_redis: RedisServer) -> Iterator[NodeConnection]:
    """A connection to a Redis of each version."""
    with NodeConnection(Node(NodeId(1), "n", every_redis.url, None), any_run=True) as connection:
        yield connection


@pytest.mark.slow
def test_steps_in_any_order_leave_what_the_model_leaves(connection: NodeConnection, key_prefix: str) -> None:
    class Here(Changes):
        pass

    Here.connection, Here.prefix = connection, key_prefix
    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


class Race:
    """Two publishers and two drivers that go for one partition after the other, all at once."""

    def __init__(self, node: Node, prefix: str, partitions: list[int]) -> None:
        self.node, self.prefix, self.partitions = node, prefix, partitions
        self.together = threading.Barrier(4)
        self.sealed: dict[int, set[tuple[str, int]]] = {partition: set() for partition in partitions}
        self.stored: dict[int, list[int]] = {partition: [] for partition in partitions}

    def publish(self, source: int) -> None:
        with NodeConnection(self.node, any_run=True) as connection:
            for partition in self.partitions:
                self.together.wait(20)
                for seq in itertools.count(1):
                    run = MessageRun(1, seq, 1, [b"1", b"k", b"%d" % seq])
                    reply = connection.call([append_command(connection, self.prefix, partition, source, [run])])[0]
                    answer = append_reply(reply, "the node")
                    if isinstance(answer, Refused):
                        assert answer == Refused("sealed", "9")
                        break
                    self.stored[partition].append(answer.offset)

    def seal(self, name: str) -> None:
        with NodeConnection(self.node, any_run=True) as connection:
            for partition in self.partitions:
                self.together.wait(20)
                answer = seal_reply(
                    connection.call([seal_command(connection, self.prefix, partition, 9, name)])[0], "the node"
                )
                assert isinstance(answer, Sealed)
                self.sealed[partition].add((answer.seal_id, answer.next_offset))


def test_no_record_is_behind_the_command_however_appends_and_seals_race(
    every_redis: RedisServer, connection: NodeConnection, key_prefix: str
) -> None:
    """Case 6: 1000 races."""
    partitions = [next(_partitions) for _ in range(RACES)]
    for partition in partitions:
        create(connection, key_prefix, partition, "t", 0, 1024, "open", "")
    race = Race(Node(NodeId(1), "n", every_redis.url, None), key_prefix, partitions)
    with ThreadPoolExecutor(4) as pool:
        crew = [pool.submit(race.publish, source) for source in (1, 2)]
        crew += [pool.submit(race.seal, name) for name in ("a", "b")]
        for one in crew:
            one.result(60)
    for partition in partitions:
        assert_nothing_behind_the_command(
            connection, key_prefix, partition, race.sealed[partition], race.stored[partition]
        )


def assert_nothing_behind_the_command(
    connection: NodeConnection, prefix: str, partition: int, sealed: set[tuple[str, int]], stored: list[int]
) -> None:
    (entries,) = connection.call([("XRANGE", partition_keys(prefix, partition).log, "-", "+")])
    command = pop_command(entries)
    assert command is not None
    assert sealed == {(command.seal_id, command.end)}
    offsets = [record.offset for record in records_of(entries)]
    assert offsets == sorted(stored) == list(range(1, command.end))


def test_a_late_arming_brings_no_lock_back_to_a_tombstone(connection: NodeConnection, key_prefix: str) -> None:
    """One that was stopped before it raised epochs, while another armed the node and the partition was retired."""
    partition = next(_partitions)
    create(connection, key_prefix, partition, "t", LP_FROM, LP_TO, "open", "")
    raising = fence_command(connection, key_prefix, partition, GROUP, 5)
    assert connection.call([raising])[0] == [b"fenced_off"]
    connection.call([retire_command(connection, key_prefix, partition, [GROUP])])
    assert connection.call([raising])[0] == [b"deleted"]
    (left,) = connection.call([("KEYS", f"{key_prefix}:{{{partition}}}:*")])
    assert left == [partition_keys(key_prefix, partition).meta]


def test_a_seal_is_appended_though_the_server_is_out_of_memory(every_redis: RedisServer, key_prefix: str) -> None:
    """A full node must be able to give its partitions away."""
    with NodeConnection(Node(NodeId(1), "n", every_redis.url, None), any_run=True) as connection:
        partition = next(_partitions)
        create(connection, key_prefix, partition, "t", LP_FROM, LP_TO, "open", "")
        connection.call([("CONFIG", "SET", "maxmemory", "1")])
        try:
            reply = connection.call([seal_command(connection, key_prefix, partition, 9, "s")])[0]
        finally:
            connection.call([("CONFIG", "SET", "maxmemory", "0")])
        if connection.connect().version >= (7, 0, 0):
            assert seal_reply(reply, "") == Sealed("s", 1, {})


def test_whoever_comes_late_to_take_a_seal_back_changes_nothing(connection: NodeConnection, key_prefix: str) -> None:
    """One that was stopped while another repaired the partition: it saw another seal, or another mark."""
    partition, name = next(_partitions), f"{SOURCE}:{LP_FROM}"
    log = partition_keys(key_prefix, partition).log

    def reopen(seal_id: str, mark: int) -> Any:
        return connection.call([reopen_command(connection, key_prefix, partition, seal_id, name, mark)])[0]

    assert reopen("old", 0) == [b"absent"]
    create(connection, key_prefix, partition, "t", LP_FROM, LP_TO, "open", "")
    assert reopen("old", 0) == [b"conflict", b"open"]
    run = MessageRun(LP_FROM, 1, 1, [b"1", b"k", b"b"])
    connection.call([append_command(connection, key_prefix, partition, SOURCE, [run])])
    connection.call([seal_command(connection, key_prefix, partition, 9, "new")])
    assert reopen("old", 1) == [b"conflict", b"sealed"]
    assert reopen("new", 0) == [b"conflict", b"sealed"]
    assert [entry_id for entry_id, _ in connection.call([("XRANGE", log, "-", "+")])[0]] == [b"1-0", b"1-1"]
    assert reopen("new", 1) == [b"open"]
    assert [entry_id for entry_id, _ in connection.call([("XRANGE", log, "-", "+")])[0]] == [b"1-0"]


def test_a_seal_is_not_taken_back_where_memory_is_out(connection: NodeConnection, key_prefix: str) -> None:
    """What was to follow it is refused too, and the next seal would need a higher entry id."""
    partition = next(_partitions)
    create(connection, key_prefix, partition, "t", LP_FROM, LP_TO, "open", "")
    connection.call([seal_command(connection, key_prefix, partition, 9, "s")])
    name, run = f"{SOURCE}:{LP_FROM}", MessageRun(LP_FROM, 1, 1, [b"1", b"k", b"b"])
    both = [
        reopen_command(connection, key_prefix, partition, "s", name, 0),
        append_command(connection, key_prefix, partition, SOURCE, [run]),
    ]
    connection.call([("CONFIG", "SET", "maxmemory", "1")])
    try:
        connection.call([("MULTI",), *both, ("EXEC",)])
    finally:
        connection.call([("CONFIG", "SET", "maxmemory", "0")])
    assert connection.call([("HGET", partition_keys(key_prefix, partition).meta, "state")]) == [b"sealed"]
    connection.call([("MULTI",), *both, ("EXEC",)])
    assert connection.call([("HGET", partition_keys(key_prefix, partition).meta, "state")]) == [b"open"]
