"""The scripts of a route change do what a plain model of one partition does, on every Redis on this machine."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from mqlayer.domain.message import pop_command, records_of
from mqlayer.domain.routing import NodeId
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.partition_scripts import (
    MARKS_PER_CALL,
    AppendReply,
    Fenced,
    LockKept,
    LockTaken,
    MessageRun,
    Refused,
    RunOutcome,
    Sealed,
    append_command,
    append_reply,
    open_partition,
    reopen_command,
    seal_command,
    seal_reply,
)
from mqlayer.stack import RedisServer
from tests.fixtures.partition_harness import SOURCE, PartitionHarness, PartitionMachine, placed, run_machine

LPS = LP_FROM, LP_TO = 4, 8
BORN_IN = 5
CHANGES = (4, 5, 6, 7, 8)
RACES = 1_000


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


class Changes(PartitionMachine):
    """Steps of several changes, right ones and wrong ones, in any order, beside publishing, consuming and trimming."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.seals = itertools.count(1)

    @rule(born=st.sampled_from([0, BORN_IN, BORN_IN]))
    def create(self, born: int) -> None:
        state, change = ("importing", born) if born else ("open", "")
        word = self.partition.create(state, change, lps=LPS)
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
        word = open_partition(*self.partition.where, change, named)
        assert word == self.model.open(change, named)

    @rule(change=st.sampled_from(CHANGES))
    def seal(self, change: int) -> None:
        seal_id = f"seal-{next(self.seals)}"
        assert self.partition.seal(change, seal_id) == self.model.seal(change, seal_id)

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
        reopening = reopen_command(*self.partition.where, seal_id, name, mark + behind)
        appending = append_command(*self.partition.where, SOURCE, [run])
        opened, appended = self.partition.call(("MULTI",), reopening, appending, ("EXEC",))[-1]
        assert opened == self.model.reopen(seal_id, name, mark + behind)
        assert append_reply(appended, "the node") == self.model.append(lp, mark + 1, count)

    @rule(sure=st.sampled_from([True, False, False, False, False]))
    def retire(self, sure: bool) -> None:
        if sure:
            assert self.partition.retire() == [b"retired"]
            self.model.retire()

    @rule(lp=st.integers(LP_FROM, LP_TO - 1), begin=st.sampled_from([0, 0, 0, -1, 2]), count=st.integers(1, 5))
    def append(self, lp: int, begin: int, count: int) -> None:
        first = max(1, self.model.marks.get(f"{SOURCE}:{lp}", 0) + 1 + begin)
        run = MessageRun(lp, first, count, [b"1700000000000", b"k", b"b"] * count)
        assert self.partition.append(run) == self.model.append(lp, first, count)

    @rule(epoch=st.integers(1, 4), start=st.sampled_from([1, 1, 3, 100]))
    def take(self, epoch: int, start: int) -> None:
        answer = self.partition.member("a", epoch).acquire(start=start, afresh=True)
        shown = LockKept(answer.committed) if isinstance(answer, LockTaken) else answer
        assert shown == self.model.take(epoch, start)
        assert not isinstance(answer, LockTaken) or answer.next_offset == self.model.next

    @rule(epoch=st.integers(1, 4), count=st.integers(1, 4))
    def settle(self, epoch: int, count: int) -> None:
        first = self.model.committed
        answer = self.partition.member("a", epoch).settle([(first, first + count - 1)])
        assert answer == self.model.settle(epoch, count)

    @rule(floor=st.sampled_from([2, 5, 2**53]))
    def trim(self, floor: int) -> None:
        word, *facts = self.partition.trim(floor, start=1, limit=10_000)
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
        keys = self.partition.keys
        meta, marks, entries = self.partition.call(
            ("HGETALL", keys.meta), ("HGETALL", keys.marks), ("XRANGE", keys.log, "-", "+")
        )
        known = dict(zip(meta[::2], meta[1::2], strict=True))
        assert known.get(b"state") == (self.model.state.encode() if self.model.state else None)
        if self.model.state == "deleted":
            assert known.keys() == {b"state"}
            assert self.partition.call(("EXISTS", keys.log, keys.marks, *self.partition.group)) == [0]
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


@pytest.mark.slow
def test_steps_in_any_order_leave_what_the_model_leaves(connection: NodeConnection, key_prefix: str) -> None:
    run_machine(placed(Changes, connection, key_prefix), examples=100, steps=30)


class Race:
    """Two publishers and two drivers that go for one partition after the other, all at once."""

    def __init__(self, node: Node, prefix: str, partitions: list[int]) -> None:
        self.node, self.prefix, self.partitions = node, prefix, partitions
        self.together = threading.Barrier(4)
        self.sealed: dict[int, set[tuple[str, int]]] = {partition: set() for partition in partitions}
        self.stored: dict[int, list[int]] = {partition: [] for partition in partitions}

    def publish(self, source: int) -> None:
        with NodeConnection(self.node, any_run=True) as connection:
            for number in self.partitions:
                partition = PartitionHarness(connection, self.prefix, number)
                self.together.wait(20)
                for seq in itertools.count(1):
                    run = MessageRun(1, seq, 1, [b"1", b"k", b"%d" % seq])
                    answer = partition.append(run, source=source)
                    assert answer is not None
                    if isinstance(answer, Refused):
                        assert answer == Refused("sealed", "9")
                        break
                    self.stored[number].append(answer.offset)

    def seal(self, name: str) -> None:
        with NodeConnection(self.node, any_run=True) as connection:
            for number in self.partitions:
                partition = PartitionHarness(connection, self.prefix, number)
                self.together.wait(20)
                answer = partition.seal(9, name)
                assert isinstance(answer, Sealed)
                self.sealed[number].add((answer.seal_id, answer.next_offset))


def test_no_record_is_behind_the_command_however_appends_and_seals_race(
    every_redis: RedisServer, connection: NodeConnection, key_prefix: str
) -> None:
    """Case 6: 1000 races."""
    partitions = list(range(1, RACES + 1))
    for partition in partitions:
        PartitionHarness(connection, key_prefix, partition).create()
    race = Race(Node(NodeId(1), "n", every_redis.url, None), key_prefix, partitions)
    with ThreadPoolExecutor(4) as pool:
        crew = [pool.submit(race.publish, source) for source in (1, 2)]
        crew += [pool.submit(race.seal, name) for name in ("a", "b")]
        for one in crew:
            one.result(60)
    for partition in partitions:
        entries = PartitionHarness(connection, key_prefix, partition).entries()
        assert_nothing_behind_the_command(entries, race.sealed[partition], race.stored[partition])


def assert_nothing_behind_the_command(entries: list[Any], sealed: set[tuple[str, int]], stored: list[int]) -> None:
    command = pop_command(entries)
    assert command is not None
    assert sealed == {(command.seal_id, command.end)}
    offsets = [record.offset for record in records_of(entries)]
    assert offsets == sorted(stored) == list(range(1, command.end))


def test_a_late_arming_brings_no_lock_back_to_a_tombstone(connection: NodeConnection, key_prefix: str) -> None:
    """One that was stopped before it raised epochs, while another armed the node and the partition was retired."""
    partition = PartitionHarness(connection, key_prefix)
    partition.create(lps=LPS)
    assert partition.fence(5) == [b"fenced_off"]
    partition.retire()
    assert partition.fence(5) == [b"deleted"]
    assert partition.call(("KEYS", f"{key_prefix}:{{1}}:*")) == [[partition.keys.meta]]


@contextmanager
def out_of_memory(connection: NodeConnection) -> Iterator[None]:
    """Let the server refuse what needs memory."""
    connection.call([("CONFIG", "SET", "maxmemory", "1")])
    try:
        yield
    finally:
        connection.call([("CONFIG", "SET", "maxmemory", "0")])


def test_a_seal_is_appended_though_the_server_is_out_of_memory(connection: NodeConnection, key_prefix: str) -> None:
    """A full node must be able to give its partitions away."""
    partition = PartitionHarness(connection, key_prefix)
    partition.create(lps=LPS)
    with out_of_memory(connection):
        reply = connection.call([seal_command(*partition.where, 9, "s")])[0]
    if connection.connect().version >= (7, 0, 0):
        assert seal_reply(reply, "") == Sealed("s", 1, {})


def test_whoever_comes_late_to_take_a_seal_back_changes_nothing(connection: NodeConnection, key_prefix: str) -> None:
    """One that was stopped while another repaired the partition: it saw another seal, or another mark."""
    partition, name = PartitionHarness(connection, key_prefix), f"{SOURCE}:{LP_FROM}"

    def reopen(seal_id: str, mark: int) -> Any:
        return partition.call(reopen_command(*partition.where, seal_id, name, mark))[0]

    assert reopen("old", 0) == [b"absent"]
    partition.create(lps=LPS)
    assert reopen("old", 0) == [b"conflict", b"open"]
    partition.append(MessageRun(LP_FROM, 1, 1, [b"1", b"k", b"b"]))
    partition.seal(9, "new")
    assert reopen("old", 1) == [b"conflict", b"sealed"]
    assert reopen("new", 0) == [b"conflict", b"sealed"]
    assert [entry_id for entry_id, _ in partition.entries()] == [b"1-0", b"1-1"]
    assert reopen("new", 1) == [b"open"]
    assert [entry_id for entry_id, _ in partition.entries()] == [b"1-0"]


def test_a_seal_is_not_taken_back_where_memory_is_out(connection: NodeConnection, key_prefix: str) -> None:
    """What was to follow it is refused too, and the next seal would need a higher entry id."""
    partition, run = PartitionHarness(connection, key_prefix), MessageRun(LP_FROM, 1, 1, [b"1", b"k", b"b"])
    partition.create(lps=LPS)
    partition.seal(9, "s")
    both = [
        reopen_command(*partition.where, "s", f"{SOURCE}:{LP_FROM}", 0),
        append_command(*partition.where, SOURCE, [run]),
    ]
    state = ("HGET", partition.keys.meta, "state")
    with out_of_memory(connection):
        connection.call([("MULTI",), *both, ("EXEC",)])
    assert connection.call([state]) == [b"sealed"]
    connection.call([("MULTI",), *both, ("EXEC",)])
    assert connection.call([state]) == [b"open"]
