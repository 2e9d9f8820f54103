"""log_append does what a plain model of one partition does, on every Redis on this machine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from mqlayer.domain.message import NO_KEY
from mqlayer.redis.keys import ended_sources_key
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import (
    AS_BEFORE,
    AS_BEFORE_UNLESS_CLOSED,
    AppendReply,
    MessageRun,
    Refused,
    RunOutcome,
    append_reply,
    end_sources,
)
from mqlayer.redis.wire import LINE_END, append_packet, append_start, bulk, bulk_head, bulk_number
from tests.fixtures.partition_harness import PartitionMachine, placed, run_machine

LPS = LP_FROM, LP_TO = 4, 8
SOURCES = (3, 12)
STATES = ("open", "sealed", "importing")

Entry = tuple[str, bytes, bytes, bytes]


@dataclass
class Model:
    """One partition as a person would write it down."""

    state: str = "open"
    change: str = ""
    next: int = 1
    marks: dict[tuple[int, int], int] = field(default_factory=dict)
    log: list[Entry] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)

    def append(self, source: int, runs: Sequence[MessageRun], backlog: int) -> AppendReply | Refused:
        if self.state != "open":
            return Refused(self.state, self.change)
        if (backlog >= 0 and source in self.ended) or (backlog == AS_BEFORE_UNLESS_CLOSED and source in self.closed):
            return Refused("ended", str(source))
        if 0 < backlog <= len(self.log):
            return Refused("full", str(len(self.log)))
        if (total := sum(run.count for run in runs)) > 500:
            return Refused("too_large", str(total))
        offset = self.next
        outcomes = [self.append_run(source, run) for run in runs]
        return AppendReply(offset, None if all(outcome.status == "ok" for outcome in outcomes) else outcomes)

    def append_run(self, source: int, run: MessageRun) -> RunOutcome:
        mark = self.marks.get((source, run.lp), 0)
        if not LP_FROM <= run.lp < LP_TO:
            return RunOutcome("unowned", 0, mark)
        if run.first > mark + 1:
            return RunOutcome("gap", 0, mark)
        last = run.first + run.count - 1
        new = max(0, last - mark)
        for seq in range(last - new + 1, last + 1):
            facts, key, body = run.fields[3 * (seq - run.first) : 3 * (seq - run.first) + 3]
            identity = f"{source}:{run.lp}:{seq}:".encode()
            self.log.append((f"{self.next}-0", identity + as_bytes(facts), as_bytes(key), as_bytes(body)))
            self.next += 1
        if new:
            self.marks[source, run.lp] = last
        return RunOutcome("ok" if run.first == mark + 1 else "dup", new, max(mark, last))


def as_bytes(field_: bytes | str) -> bytes:
    return field_ if isinstance(field_, bytes) else field_.encode()


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Runs of one call: distinct LPs, each with where it begins (0: right after the mark) and its length."""
    lps = draw(st.lists(st.integers(LP_FROM - 1, LP_TO), min_size=1, max_size=4, unique=True))
    begins = st.sampled_from([0, 0, 0, 0, 0, -1, -2, -5, 1, 3])
    return [(lp, draw(begins), draw(st.integers(1, 6))) for lp in lps]


class Appends(PartitionMachine):
    """Calls of two sources, right ones and wrong ones, in any order, beside changes of the partition's state."""

    def __init__(self) -> None:
        super().__init__()
        self.partition.create(lps=LPS)
        self.keys = self.partition.keys
        self.model = Model()
        self.connection.call([("DEL", ended_sources_key(self.prefix))])
        self.messages = itertools.count(1)

    @rule(
        source=st.sampled_from(SOURCES),
        plan=steps(),
        backlog=st.sampled_from([0, 0, 0, 0, 5, 40, AS_BEFORE, AS_BEFORE_UNLESS_CLOSED]),
        as_packet=st.booleans(),
    )
    def append(self, source: int, plan: list[tuple[int, int, int]], backlog: int, as_packet: bool) -> None:
        runs = []
        for lp, begin, count in plan:
            first = max(1, self.model.marks.get((source, lp), 0) + 1 + begin)
            runs.append(MessageRun(lp, first, count, self.fields(count)))
        self.check(source, runs, backlog, as_packet=as_packet)

    @rule(source=st.sampled_from(SOURCES), as_packet=st.booleans(), count=st.sampled_from([499, 500, 501]))
    def append_many(self, source: int, as_packet: bool, count: int) -> None:
        first = self.model.marks.get((source, LP_FROM), 0) + 1
        self.check(source, [MessageRun(LP_FROM, first, count, self.fields(count))], 0, as_packet=as_packet)

    @rule(state=st.sampled_from(STATES))
    def change_state(self, state: str) -> None:
        self.model.state, self.model.change = state, "" if state == "open" else "41"
        changes = ("change", self.model.change, "sealed_for", self.model.change)
        self.connection.call([("HSET", self.keys.meta, "state", state, *changes)])

    @rule()
    def open_again(self) -> None:
        self.change_state("open")

    @rule(source=st.sampled_from(SOURCES), closed=st.booleans())
    def end_or_forget(self, source: int, closed: bool) -> None:
        """An outbox goes on under another source, or is to; that it does so is the node's, and gone with its data."""
        if source in self.model.ended:
            self.model.ended.remove(source)
            self.model.closed.discard(source)
            self.connection.call([("SREM", ended_sources_key(self.prefix), source, f"{source}:closed")])
        else:
            self.model.ended.add(source)
            self.model.closed |= {source} if closed else set()
            end_sources(self.connection, self.prefix, [source], closed=closed, partitions=())

    @rule()
    def hand_over_a_mark(self) -> None:
        """As a route change does: the partition holds a mark without its records."""
        self.model.marks[SOURCES[0], LP_FROM + 1] = mark = self.model.marks.get((SOURCES[0], LP_FROM + 1), 0) + 3
        self.connection.call([("HSET", self.keys.marks, f"{SOURCES[0]}:{LP_FROM + 1}", mark)])

    @invariant()
    def the_servers_state_is_the_models(self) -> None:
        next_offset, marks, entries = self.connection.call(
            [("HGET", self.keys.meta, "next"), ("HGETALL", self.keys.marks), ("XRANGE", self.keys.log, "-", "+")]
        )
        assert int(next_offset) == self.model.next
        named = zip(marks[::2], marks[1::2], strict=True)
        assert {tuple(map(int, name.split(b":"))): int(mark) for name, mark in named} == self.model.marks
        found = [(entry_id.decode(), fields[1], fields[3], fields[5]) for entry_id, fields in entries]
        assert found == self.model.log
        assert all(fields[::2] == [b"m", b"k", b"b"] for _, fields in entries)

    def check(self, source: int, runs: list[MessageRun], backlog: int, *, as_packet: bool) -> None:
        assert self.send(source, runs, backlog, as_packet=as_packet) == self.model.append(source, runs, backlog)

    def send(
        self, source: int, runs: list[MessageRun], backlog: int, *, as_packet: bool
    ) -> AppendReply | Refused | None:
        if not as_packet:
            return self.partition.append(*runs, source=source, backlog=backlog)
        heads = [bulk_number(number) for run in runs for number in (run.lp, run.first, run.count)]
        pieces: list[bytes] = []
        for run in runs:
            parts = [as_bytes(part) for part in run.fields]
            for facts, key, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
                pieces += (bulk(facts), bulk(key), bulk_head(len(body)), body, LINE_END)
        count = sum(run.count for run in runs)
        digest = self.connection.digest("log_append")
        start = append_start(digest, *self.partition.place, source, backlog)
        self.connection.send_packet(append_packet(start, heads, pieces, count=count))
        return append_reply(self.connection.receive(1)[0], "the node")

    def fields(self, count: int) -> list[bytes]:
        """Facts, key and body of new messages: no two are equal."""
        fields: list[bytes] = []
        for number in itertools.islice(self.messages, count):
            key = NO_KEY if number % 7 == 0 else f"schlüssel-{number % 5}".encode()
            facts = b'1700000000000:{"a":"b:c"}' if number % 3 == 0 else b"1700000000000"
            fields += (facts, key, b"\x00\r\n%d" % number)
        return fields


@pytest.mark.slow
def test_appends_in_any_order_leave_what_the_model_leaves(connection: NodeConnection, key_prefix: str) -> None:
    run_machine(placed(Appends, connection, key_prefix), steps=30)
