"""The scripts of ordered pop do what a plain model of one partition and one group does, on every Redis here.

Cases 50 to 54, 56 to 58. The model knows no time: a message that is out is invisible for an hour, or no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from mqlayer.domain.key_classes import KeyClassRule, key_class_rule
from mqlayer.domain.message import NO_KEY, Record, encode_facts
from mqlayer.domain.offsets import is_settled
from mqlayer.domain.rates import RateShare
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.outcomes import OutcomeId as At
from mqlayer.redis.outcomes import encode_pop_outcome
from mqlayer.redis.partition_scripts import Fenced, GroupStart, Refused
from mqlayer.redis.pop_scripts import NoBatch, PopBatch, PopClasses, PopSettled, Scope, SettleAction
from mqlayer.redis.retention_scripts import LogBound
from tests.fixtures.partition_harness import (
    GROUP,
    HOUR_MS,
    PartitionHarness,
    PartitionMachine,
    ReceiverScripts,
    in_ms,
    placed,
    run_machine,
)
from tests.fixtures.popped import packed_batches
from tests.fixtures.state_programs import Program, play
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until

BRIEF_MS = 1
"""Over before the next call, which waits for that."""

MOST_CALLS: Final = 200
"""How often a receive is called again that has more to look at."""
LOOK_LIMIT: Final = 1000
"""At how many new messages a receive looks."""
UNPACK_LIMIT: Final = 8
"""How many batches that are visible a receive unpacks."""
KEPT: Final = 4
"""How many entries of what was told wait to be fetched, here."""
WORDS: Final[tuple[SettleAction, ...]] = ("ack", "nack", "extend")

Token = tuple[int, int, int]
"""Epoch, batch, offset."""


@dataclass
class Out:
    """A message that is out: with which batch (0: it was given back), and whether it is invisible."""

    batch: int
    invisible: bool


@dataclass
class Model:
    """One partition and one group at it, as a person would write it down."""

    scope: Scope
    next: int = 1
    owned: bool = False
    epoch: int = 0
    seek: int = 0
    start: int = 0
    batch: int = 0
    settled: set[int] = field(default_factory=set)
    # Of those, what the topic's limits settled: what is out of it stays until it is answered or visible.
    dropped: set[int] = field(default_factory=set)
    times: dict[int, int] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    out: dict[int, Out] = field(default_factory=dict)
    batches: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    # What acks told: place, offsets with how often they were given, offsets that were dropped before.
    told: list[tuple[At, dict[int, int], int]] = field(default_factory=list)
    tellings: int = 0
    class_concurrency: int | None = None
    # Queues that are out again after their time, or were given without classes: a node need not know of their keys.
    returned_late: set[str] = field(default_factory=set)

    def tell(self, said: dict[int, int]) -> None:
        dropped = 0
        while len(self.told) >= KEPT:
            _, oldest, before = self.told.pop(0)
            dropped += len(oldest) + before
        self.tellings += 1
        self.told.append((At(self.epoch, self.tellings), said, dropped))

    @property
    def committed(self) -> int:
        """The first offset that is not settled."""
        return next((o for o in range(self.start, self.next) if o not in self.settled), self.next)

    def queue_of(self, offset: int) -> str:
        if self.scope == "partition":
            return ""
        key = key_at(offset)
        return f"\xff{offset}" if key == b"\xff" else key.decode()

    def queues(self) -> dict[str, list[int]]:
        lines: dict[str, list[int]] = {}
        for offset in range(self.start, self.next):
            if offset not in self.settled:
                lines.setdefault(self.queue_of(offset), []).append(offset)
        return lines

    def free_queues(self) -> dict[str, list[int]]:
        """What may be given out: lanes of which nothing is out and invisible."""
        withheld = {self.queue_of(offset) for offset, out in self.out.items() if out.invisible}
        return {lane: offsets for lane, offsets in self.queues().items() if lane not in withheld}

    def keys_left(self, name: str, *, known: bool) -> int:
        """How many keys of a class may be given; `known`: beside those that a node certainly knows of."""
        if self.class_concurrency is None:
            return self.next
        withheld = {self.queue_of(offset) for offset, out in self.out.items() if out.invisible}
        out = {lane for lane in withheld if class_of(lane) == name and self.is_with_a_receiver(lane)}
        return max(0, self.class_concurrency - len(out - self.returned_late if known else out))

    def is_with_a_receiver(self, lane: str) -> bool:
        front = min(offset for offset in self.out if self.queue_of(offset) == lane)
        return self.out[front].batch > 0

    @property
    def passes_many(self) -> bool:
        """Whether dropped messages, or more batches than a call unpacks, stand before others."""
        visible = {out.batch for out in self.out.values() if not out.invisible}
        return bool(self.dropped & self.out.keys()) or len(visible) > UNPACK_LIMIT

    def begin(self, epoch: int, start: int, seek: int) -> Fenced | None:
        if not (self.owned and self.epoch == epoch) and self.epoch >= epoch:
            return Fenced(self.epoch)
        if self.start == 0 or seek > self.seek:
            self.begin_at(min(start, self.next), seek)
        self.owned, self.epoch = True, epoch
        return None

    def begin_at(self, start: int, seek: int) -> None:
        self.settled, self.dropped, self.times, self.failed, self.out = set(), set(), {}, {}, {}
        self.batches, self.start, self.seek = {}, start, seek
        self.returned_late = set()

    def drop(self, bound: int, start: int, seek: int) -> int:
        begun = self.start > 0 and self.seek >= seek
        position = self.committed if begun else min(start, self.next)
        if position >= bound:
            return 0
        if not begun:
            self.begin_at(bound, seek)
            return bound - position
        lost = set(range(self.start, bound)) - self.settled
        self.settled |= lost
        self.dropped |= lost
        return len(lost)

    def take(self, attempt: str, offsets: Sequence[int], *, invisible: bool) -> None:
        self.batch += 1
        lanes = {self.queue_of(offset) for offset in offsets}
        for lane in lanes:
            # Not settled in its time: the first one failed, and those behind it were not begun.
            first = min(offset for offset in offsets if self.queue_of(offset) == lane)
            behind = any(self.queue_of(offset) == lane for offset in self.dropped & self.out.keys())
            if first in self.out and self.out[first].batch and not behind:
                self.fail(first)
        for offset in [offset for offset in self.out if self.queue_of(offset) in lanes]:
            del self.out[offset]
        self.returned_late -= lanes
        for offset in offsets:
            self.out[offset] = Out(self.batch, invisible)
            self.times[offset] = self.times.get(offset, 0) + 1
        self.batches[attempt] = (self.batch, list(offsets))

    def fail(self, offset: int) -> None:
        self.failed[offset] = self.failed.get(offset, 0) + 1

    def extend(self, offset: int, *, invisible: bool) -> None:
        if not self.out[offset].invisible:
            self.returned_late.add(self.queue_of(offset))
        self.out[offset].invisible = invisible

    def again(self, attempt: str) -> list[int]:
        batch, offsets = self.batches.get(attempt, (0, []))
        left = [offset for offset in offsets if offset not in self.dropped and offset in self.out]
        return [offset for offset in left if self.out[offset].batch == batch]

    def settle(self, word: SettleAction, epoch: int, tokens: Sequence[tuple[int, int]], *, invisible: bool) -> object:
        if not self.owned or epoch != self.epoch:
            return Fenced(self.epoch)
        if any(offset >= self.next for _, offset in tokens):
            return Refused("unknown", str(self.next))
        ours = {o for b, o in tokens if o in self.out and self.out[o].batch == b != 0}
        stale = [
            place for place, (b, o) in enumerate(tokens, start=1)
            if (o not in self.out or self.out[o].batch != b or b == 0)
            and not (word == "ack" and (o in self.settled or o < self.start))
        ]  # fmt: skip
        if word == "ack" and ours:
            self.tell({offset: self.times[offset] for offset in sorted(ours)})
        for offset in sorted(ours):
            if word == "ack":
                self.settled.add(offset)
                del self.out[offset]
                self.times.pop(offset, None)
                self.failed.pop(offset, None)
            elif word == "extend":
                self.extend(offset, invisible=invisible)
            elif offset in self.out and self.out[offset].batch:
                self.fail(offset)
                self.out[offset] = Out(0, invisible)
                behind = [o for o in self.out if o > offset and self.queue_of(o) == self.queue_of(offset)]
                for other in behind:
                    del self.out[other]
        return PopSettled(self.committed, stale)


class PopScripts(PartitionMachine):
    """Receivers that ask, settle, fail and are late, beside appends, arming and seeks."""

    scope: Scope
    classes: PopClasses | None = None

    def __init__(self) -> None:
        super().__init__()
        self.partition.create()
        self.model = Model(self.scope)
        self.asks_by(self.classes)
        self.epoch, self.seek, self.start = 1, 0, 1
        self.tokens: list[Token] = []
        self.attempts = 0

    def asks_by(self, classes: PopClasses | None) -> None:
        """Have receivers ask by these classes from now on."""
        self.asked_by, self.model.class_concurrency = classes, classes.concurrency if classes else None

    def receiver(self, epoch: int) -> ReceiverScripts:
        return self.partition.receiver(self.scope, epoch, self.start, self.seek, classes=self.asked_by)

    def server_ms(self) -> int:
        return in_ms(self.connection.call([("TIME",)])[0])

    def pass_one_ms(self) -> None:
        """Queues that are due since one ms are given out in the order of their names: not by chance, for replays."""
        at = self.server_ms()
        while self.server_ms() == at:
            pass

    @initialize(start=st.integers(1, 4))
    def begin(self, start: int) -> None:
        self.start = start

    @rule(count=st.sampled_from([1, 2, 5, 12, 130]))
    def append(self, count: int) -> None:
        self.partition.add(range(self.model.next, self.model.next + count), key_at, body_at)
        self.model.next += count

    @rule(limit=st.sampled_from([1, 2, 5, 40, 500]), brief=st.booleans(), step=st.sampled_from([0] * 8 + [-1]))
    def receive(self, limit: int, brief: bool, step: int) -> None:
        """Case 50, 52, 58: what is out blocks its lane; what comes again comes in order, and is counted."""
        self.attempts += 1
        self.receive_as(f"a{self.attempts}", limit, brief=brief, epoch=self.epoch + step)

    @precondition(lambda self: self.classes is not None)
    @rule(limit=st.sampled_from([1, 5, 40]), brief=st.booleans())
    def receive_without_classes(self, limit: int, brief: bool) -> None:
        """A receiver that read the group's settings before or after it had classes: it takes what is due."""
        self.asks_by(None)
        self.receive(limit, brief, 0)
        self.asks_by(self.classes)
        self.model.returned_late |= {self.model.queue_of(offset) for offset in self.model.out}

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data(), limit=st.sampled_from([1, 40]), brief=st.booleans())
    def receive_again(self, data: st.DataObject, limit: int, brief: bool) -> None:
        """Case 57: the same attempt gets what is left of its batch, without counting."""
        attempt = data.draw(st.sampled_from(sorted(self.model.batches)))
        before = self.model.begin(self.epoch, self.start, self.seek)
        left = self.model.again(attempt)
        if before is not None or not left:
            self.receive_as(attempt, limit, brief=brief, epoch=self.epoch)
            return
        batch = self.model.batches[attempt][0]
        answer = self.asked(attempt, limit, brief=brief, epoch=self.epoch)
        assert isinstance(answer, PopBatch)
        assert (answer.batch, [record.offset for record in answer.records]) == (batch, left)
        assert list(answer.delivery_counts) == [self.model.times[offset] for offset in left]
        self.check_failures(answer)
        for offset in left:
            self.model.extend(offset, invisible=self.model.out[offset].invisible or not brief)
        self.note_passed()
        self.tokens += [(self.epoch, batch, offset) for offset in left]

    def asked(self, attempt: str, limit: int, *, brief: bool, epoch: int) -> object:
        """Receive; wait until what is invisible for a moment only is visible, by the server's clock."""
        answer = None
        for _ in range(MOST_CALLS):
            answer = self.receiver(epoch).receive(attempt, limit, BRIEF_MS if brief else HOUR_MS)
            if not (isinstance(answer, NoBatch) and answer.status == "more"):
                break
        if brief:
            over = self.server_ms() + BRIEF_MS + 1
            wait_until(lambda: self.server_ms() >= over, what="the server's clock to have gone on")
        return answer

    def receive_as(self, attempt: str, limit: int, *, brief: bool, epoch: int) -> None:
        answer = self.asked(attempt, limit, brief=brief, epoch=epoch)
        refused = self.model.begin(epoch, self.start, self.seek)
        if refused is not None:
            assert answer == refused
            return
        free = self.model.free_queues()
        if not any(self.model.keys_left(class_of(lane), known=isinstance(answer, PopBatch)) for lane in free):
            assert isinstance(answer, NoBatch)
            invisible = any(out.invisible for out in self.model.out.values())
            blocked = self.scope == "partition" and (invisible or bool(self.model.queues()))
            assert (answer.status, answer.next_offset) == ("blocked" if blocked else "empty", self.model.next)
            assert (answer.wait_ms > 0) == invisible
            self.note_passed()
            return
        assert isinstance(answer, PopBatch)
        self.check_batch(answer, free, limit)
        offsets = [record.offset for record in answer.records]
        self.model.take(attempt, offsets, invisible=not brief)
        assert answer.batch == self.model.batch
        assert list(answer.delivery_counts) == [self.model.times[offset] for offset in offsets]
        self.check_failures(answer)
        self.note_passed()
        self.tokens += [(epoch, answer.batch, offset) for offset in offsets]

    def check_failures(self, answer: PopBatch) -> None:
        told = answer.failures or [0] * len(answer.records)
        assert list(told) == [self.model.failed.get(record.offset, 0) for record in answer.records]

    def check_batch(self, answer: PopBatch, free: dict[str, list[int]], limit: int) -> None:
        """Of each free lane its first messages, in order; all of them where there was room.

        Fewer where a call looked at many that it could not give.
        """
        of_lane: dict[str, list[int]] = {}
        for record in answer.records:
            of_lane.setdefault(self.model.queue_of(record.offset), []).append(record.offset)
            assert (record.key, record.body) == (key_at(record.offset), body_at(record.offset))
        assert 1 <= len(answer.records) <= limit
        for lane, offsets in of_lane.items():
            assert offsets == free[lane][: len(offsets)], lane
        if self.asked_by is not None:
            self.check_classes(of_lane, free, limit)
        elif len(answer.records) < limit and not self.model.passes_many and not (self.classes and self.model.dropped):
            # What waited by class when limits dropped it is passed, too.
            assert of_lane == free

    def check_classes(self, of_lane: dict[str, list[int]], free: dict[str, list[int]], limit: int) -> None:
        """No class got two more than one that had more, nor more keys than it may have out."""
        given: dict[str, list[str]] = {}
        there: dict[str, list[str]] = {}
        for lane in free:
            there.setdefault(class_of(lane), []).append(lane)
        for lane in of_lane:
            given.setdefault(class_of(lane), []).append(lane)
        for name, lanes in given.items():
            assert len(lanes) <= self.model.keys_left(name, known=True)
        if self.model.passes_many or self.model.next > LOOK_LIMIT:
            return
        counts = {name: sum(len(of_lane[lane]) for lane in given.get(name, ())) for name in there}
        for name, lanes in there.items():
            some = given.get(name, [])
            more_keys = len(some) < min(len(lanes), self.model.keys_left(name, known=False))
            if more_keys or any(of_lane[lane] != free[lane] for lane in some):
                assert max(counts.values()) <= counts[name] + 1
                assert sum(counts.values()) == limit

    @precondition(lambda self: self.tokens)
    @rule(
        data=st.data(),
        word=st.sampled_from(["ack", "ack", "ack", "nack", "extend"]),
        brief=st.booleans(),
        wrong=st.sampled_from([0] * 9 + [1]),
    )
    def settle_some(self, data: st.DataObject, word: SettleAction, brief: bool, wrong: int) -> None:
        """Cases 51, 53, 54, 56: any tokens of any time, in any order, twice, now and then of nobody."""
        recent = self.tokens[-40:]
        chosen = data.draw(st.lists(st.sampled_from(recent), min_size=1, max_size=12))
        epoch = chosen[0][0]
        pairs = [(batch + wrong, offset) for of, batch, offset in chosen if of == epoch]
        self.settle(word, epoch, pairs, brief=brief)

    @precondition(lambda self: self.model.next > 2)
    @rule(more=st.sampled_from([2, 3, 40]), less=st.sampled_from([1, 2]), word=st.sampled_from(WORDS))
    def receive_less_than_before(self, more: int, less: int, word: SettleAction) -> None:
        """Case 53: what comes again may be fewer; the tokens of the others are void too, and wait in their lanes."""
        before = len(self.tokens)
        self.receive(more, brief=True, step=0)
        old = self.tokens[before:]
        self.receive(less, brief=False, step=0)
        if old:
            self.settle(word, old[0][0], [(batch, offset) for _, batch, offset in old], brief=True)

    @precondition(lambda self: self.late())
    @rule(data=st.data(), word=st.sampled_from(WORDS), brief=st.booleans())
    def settle_what_others_have(self, data: st.DataObject, word: SettleAction, brief: bool) -> None:
        """Case 53: tokens of an earlier batch, of messages that are out with a later one."""
        chosen = data.draw(st.lists(st.sampled_from(self.late()), min_size=1, max_size=5))
        self.settle(word, self.model.epoch, chosen, brief=brief)

    def late(self) -> list[tuple[int, int]]:
        """Return the tokens of the epoch in force whose messages are out with another batch."""
        out = self.model.out
        return [
            (batch, offset)
            for epoch, batch, offset in self.tokens
            if epoch == self.model.epoch and offset in out and out[offset].batch != batch
        ]

    @precondition(lambda self: any(out.batch == 0 for out in self.model.out.values()))
    @rule(word=st.sampled_from(WORDS), brief=st.booleans())
    def settle_what_was_given_back(self, word: SettleAction, brief: bool) -> None:
        """Case 53: no receiver has it; what it is kept under is no batch."""
        pairs = [(0, offset) for offset, out in sorted(self.model.out.items()) if out.batch == 0]
        self.settle(word, self.model.epoch, pairs, brief=brief)

    @precondition(lambda self: self.model.next > 9)
    @rule(again=st.booleans())
    def ack_one_by_one(self, again: bool) -> None:
        """More acks than entries are kept: what one dropped counts on when it is dropped itself."""
        self.receive(40, brief=False, step=0)
        for offset, out in sorted(self.model.out.items())[:11]:
            for _ in range((1 + again) * bool(out.batch)):
                self.settle("ack", self.model.epoch, [(out.batch, offset)], brief=False)

    @precondition(lambda self: self.model.out)
    @rule(word=st.sampled_from(WORDS), brief=st.booleans(), first=st.booleans())
    def settle_what_is_out(self, word: SettleAction, brief: bool, first: bool) -> None:
        pairs = [(out.batch, offset) for offset, out in sorted(self.model.out.items()) if out.batch]
        if pairs:
            self.settle(word, self.model.epoch, pairs[:1] if first else pairs, brief=brief)

    @precondition(lambda self: self.model.start)
    @rule(offset=st.integers(0, 3), batch=st.integers(0, 2))
    def settle_what_nobody_has(self, offset: int, batch: int) -> None:
        """Case 54: an offset that was never appended changes nothing."""
        pairs = [(batch, max(1, self.model.next - 2 + offset))]
        self.settle("ack", self.model.epoch, pairs, brief=True)

    def settle(self, word: SettleAction, epoch: int, pairs: Sequence[tuple[int, int]], *, brief: bool) -> None:
        ms = 0 if brief else HOUR_MS
        for at in range(0, len(pairs), 500):
            piece = pairs[at : at + 500]
            told = encode_pop_outcome("r", max_entries=KEPT)
            expected = self.model.settle(word, epoch, piece, invisible=not brief)
            assert self.receiver(epoch).settle(word, piece, ms=ms, told=told) == expected
            self.pass_one_ms()

    @rule(step=st.sampled_from([0, 1, 2]), told=st.booleans())
    def raise_epoch(self, step: int, told: bool) -> None:
        """Its node is armed again: what was given out before is refused, and waits until it is visible."""
        if told:
            self.epoch = max(1, self.model.epoch + step)
            reply = self.partition.fence(self.epoch)
            if self.model.epoch >= self.epoch:
                assert reply == [b"unchanged", self.model.epoch]
                # What Postgres gives out only grows.
                self.epoch = self.model.epoch + (0 if self.model.owned else 1)
            else:
                assert reply == [b"fenced_off"]
                self.model.owned, self.model.epoch = False, self.epoch - 1
        else:
            self.epoch += step

    @rule(start=st.integers(1, 6))
    def seek_to(self, start: int) -> None:
        """All that was before is void; so are its tokens, for a seek raises the epoch."""
        self.seek += 1
        self.epoch = max(self.epoch, self.model.epoch) + 1
        self.start = start

    @precondition(lambda self: self.model.next > 1)
    @rule(more=st.integers(0, 30), above=st.booleans())
    def drop_below(self, more: int, above: bool) -> None:
        """The topic's limits settle what is out, what waits and what nobody looked at."""
        lowest = self.model.committed if above and self.model.start else 1
        offset = min(lowest + more, self.model.next - 1)
        place = GroupStart(GROUP, self.seek, self.start)
        dropped = self.partition.drop(LogBound(offset + 1, b"1:0:%d:0" % offset, True), place)
        assert dropped is not None
        assert dropped.lost == self.model.drop(offset + 1, self.start, self.seek)

    @invariant()
    def each_ack_tells_what_it_settled_and_how_often_that_was_given(self) -> None:
        told = []
        for entry in self.partition.told():
            assert entry.member == "r"
            assert all((one.delivered_ms_ago or -1) >= 0 for one in entry.ranges if one.delivered_ms_ago != 0)
            times = {o: one.attempts for one in entry.ranges for o in range(one.first, one.last + 1)}
            told.append((entry.entry_id, times, entry.dropped))
        assert told == self.model.told

    @invariant()
    def the_servers_state_is_the_models(self) -> None:
        group, pop = self.partition.group, self.partition.pops
        (owner, epoch, committed, base, seen, *counts), bits, times, pops, lines, due, batches = self.partition.call(
            ("HMGET", group.lock, "owner", "epoch", "committed", "base", "examined", "packed", "queued"),
            ("GET", group.acks),
            ("HGETALL", group.attempts),
            ("HGETALL", pop.pops),
            ("ZRANGE", pop.queues, 0, -1),
            ("ZRANGE", pop.due, 0, -1),
            ("HGETALL", pop.batches),
        )
        model = self.model
        assert (owner == b"pop", int(epoch or 0)) == (model.owned, model.epoch)
        if model.start == 0:
            return
        assert int(committed) == model.committed
        assert {o for o in range(model.start, model.next) if is_settled_at(o, committed, base, bits)} == model.settled
        packed = packed_batches(dict(zip(batches[::2], batches[1::2], strict=True)))
        left = {o: int(batch) for batch, offsets in packed.items() for o in offsets if o not in model.settled}
        self.pass_dropped({int(o) for o in pops[::2]})
        noted = {int(o): int(value.split(b":")[0]) for o, value in zip(times[::2], times[1::2], strict=True)}
        counted = noted | {o: noted.get(o, 0) + 1 for o in left}
        assert {o: count for o, count in counted.items() if o not in model.dropped} == {
            o: count for o, count in model.times.items() if o not in model.dropped
        }
        out = {int(o): int(value.split(b":")[0]) for o, value in zip(pops[::2], pops[1::2], strict=True)}
        assert out | left == {offset: out.batch for offset, out in model.out.items()}
        assert not out.keys() & left.keys()
        looked_at = {o for connection in model.queues().values() for o in connection if o < max(int(seen), model.start)}
        members = {int(member[-16:]) for member in lines}
        assert members - model.dropped == looked_at - left.keys()
        assert members >= model.dropped & model.out.keys()
        lanes = {model.queue_of(offset) for offset in looked_at | members}
        names = {name.decode("latin1") if name[:1] == b"\xff" else name.decode() for name in due if name[:1] != b"\xfe"}
        assert names == lanes
        assert {name[1:] for name in due if name[:1] == b"\xfe"} == set(packed)
        assert [int(count or 0) for count in counts] == [len(packed), len(lines)]
        look = self.partition.position()
        assert look is not None
        assert look.position == model.committed
        assert look.unsettled == model.next - model.start - len(model.settled)

    def note_passed(self) -> None:
        """A receive may remove what is dropped: acks behind it in the same rule find nothing of that."""
        (out,) = self.partition.call(("HKEYS", self.partition.pops.pops))
        self.pass_dropped({int(offset) for offset in out})

    def pass_dropped(self, out: set[int]) -> None:
        """What is dropped and visible leaves its queue with some later call."""
        for offset in self.model.dropped & self.model.out.keys() - out:
            assert not self.model.out[offset].invisible
            del self.model.out[offset]


def is_settled_at(offset: int, committed: bytes, base: bytes, bits: bytes | None) -> bool:
    """Return whether a message is settled, as the server keeps it."""
    return offset < int(committed) or is_settled(offset, int(base), bits or b"")


def key_at(offset: int) -> bytes:
    """Return the key of the message at an offset; every seventh has none."""
    return b"\xff" if offset % 7 == 0 else (b"a/k", b"a/k\x00", b"b/k1", b"\xc3\xa9")[offset % 5 % 4]


def class_of(lane: str) -> str:
    """Return the class of a queue by the prefix of its key."""
    return lane.partition("/")[0] if "/" in lane else ""


def body_at(offset: int) -> bytes:
    """Return the body of the message at an offset."""
    return b"body %d" % offset


def ack_what_a_receive_passed(state: PopScripts) -> None:
    """Limits dropped all that was out, and it is visible: the receive before the acks removes it."""
    state.begin(start=1)
    state.append(count=12)
    state.receive(brief=True, limit=40, step=0)
    state.drop_below(above=False, more=30)
    state.ack_one_by_one(again=False)


def settle_what_a_receive_passed(state: PopScripts) -> None:
    """The same, in the rule that receives twice."""
    state.begin(start=1)
    state.append(count=5)
    state.receive(brief=True, limit=40, step=0)
    state.drop_below(above=False, more=30)
    state.receive_less_than_before(less=1, more=40, word="ack")


def ack_beside_what_a_receive_passed(state: PopScripts) -> None:
    """The receive gives out messages of other keys, and removes the dropped one."""
    state.begin(start=1)
    state.append(count=5)
    state.append(count=5)
    state.receive(brief=True, limit=1, step=0)
    state.drop_below(above=False, more=5)
    state.ack_one_by_one(again=False)


def receive_behind_queues_that_are_passed(state: PopScripts) -> None:
    """As many queues as are wanted hold dropped messages only: those that are due behind them are looked at, too."""
    state.begin(start=1)
    state.append(count=5)
    state.receive(brief=False, limit=500, step=0)
    state.append(count=130)
    state.receive(brief=True, limit=40, step=0)
    state.drop_below(above=False, more=13)
    for _ in range(8):
        state.receive(brief=False, limit=1, step=0)


def receive_one_of_two_batches_that_are_visible(state: PopScripts) -> None:
    """The first one is unpacked; the second one, which was visible before, is no reason to look at nothing else."""
    state.begin(start=1)
    state.append(count=2)
    state.receive(brief=False, limit=1, step=0)
    state.receive(brief=False, limit=1, step=0)
    state.settle_what_is_out(brief=True, first=False, word="extend")
    state.receive(brief=False, limit=1, step=0)
    state.receive(brief=False, limit=1, step=0)


def receive_of_many_batches_that_are_visible(state: PopScripts) -> None:
    """The same, of more than one call unpacks."""
    state.begin(start=1)
    for _ in range(10):
        state.append(count=12)
        state.receive(brief=False, limit=1, step=0)
    state.receive(brief=False, limit=40, step=0)
    state.settle_what_is_out(brief=True, first=False, word="extend")
    for limit in (1, 2, 5, 40):
        state.receive(brief=False, limit=limit, step=0)


def wait_under_the_name_of_another_time(state: PopScripts) -> None:
    """What the index of classes kept over a seek has the name of a queue that waits anew."""
    state.begin(start=1)
    state.append(count=1)
    state.append(count=12)
    state.ack_one_by_one(again=False)
    state.seek_to(start=1)
    state.drop_below(above=False, more=0)
    state.ack_one_by_one(again=False)
    state.ack_one_by_one(again=False)


def receive_behind_what_waited_by_class(state: PopScripts) -> None:
    """Limits dropped it: a call without classes passes it, and gives fewer than it may."""
    state.begin(start=1)
    state.append(count=1)
    state.append(count=130)
    for _ in range(2):
        state.ack_one_by_one(again=False)
    state.drop_below(above=False, more=13)
    for _ in range(8):
        state.receive_without_classes(brief=False, limit=5)


PROGRAMS: list[Program[PopScripts]] = [
    wait_under_the_name_of_another_time,
    receive_behind_queues_that_are_passed,
    receive_one_of_two_batches_that_are_visible,
    receive_of_many_batches_that_are_visible,
    ack_what_a_receive_passed,
    settle_what_a_receive_passed,
    ack_beside_what_a_receive_passed,
]
"""What chance found once, and what is of its kind."""
CLASS_PROGRAMS: list[Program[PopScripts]] = [*PROGRAMS, receive_behind_what_waited_by_class]


@pytest.mark.parametrize("scope", ["partition", "key"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_chance_found_once_leaves_what_the_model_leaves(
    connection: NodeConnection, key_prefix: str, scope: Scope, program: Program[PopScripts]
) -> None:
    play(placed(PopScripts, connection, key_prefix, scope=scope), program)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["partition", "key"])
def test_receivers_calls_in_any_order_leave_what_the_model_leaves(
    connection: NodeConnection, key_prefix: str, scope: Scope
) -> None:
    run_machine(placed(PopScripts, connection, key_prefix, scope=scope), examples=40)


def rule_of(text: str) -> KeyClassRule:
    """Return a rule of classes."""
    found = key_class_rule(text)
    assert found is not None
    return found


BY_PREFIX: Final = rule_of("prefix:/")


@pytest.mark.slow
@pytest.mark.parametrize(("concurrency", "examples"), some_of([(2, 12), (2, 60), (1, 60), (None, 60)], 4))
def test_classes_of_keys_take_turns_in_calls_of_any_order(
    connection: NodeConnection, key_prefix: str, concurrency: int | None, examples: int
) -> None:
    classes = PopClasses(BY_PREFIX, concurrency)
    run_machine(placed(PopScripts, connection, key_prefix, scope="key", classes=classes), examples=examples)


@pytest.mark.parametrize("concurrency", [None, 1])
@pytest.mark.parametrize("program", CLASS_PROGRAMS)
def test_with_classes_what_chance_found_once_leaves_what_the_model_leaves(
    connection: NodeConnection, key_prefix: str, program: Program[PopScripts], concurrency: int | None
) -> None:
    classes = PopClasses(BY_PREFIX, concurrency)
    play(placed(PopScripts, connection, key_prefix, scope="key", classes=classes), program)


def test_each_call_goes_on_with_the_class_behind_the_last_one(connection: NodeConnection, key_prefix: str) -> None:
    """Messages of three classes, those of one class first: one message a call, whoever asks."""
    partition = PartitionHarness(connection, key_prefix)
    partition.create()
    partition.add(range(1, 10), lambda offset: b"%c/%d" % (b"acb"[(offset - 1) // 3], offset), body_at)
    came = [given_alone(partition, f"a{turn}") for turn in range(9)]
    assert [sorted(came[at : at + 3]) for at in (0, 3, 6)] == [[b"a", b"b", b"c"]] * 3
    assert came[:3] == came[3:6] == came[6:]


def test_no_class_has_a_second_turn_before_another_s_first(connection: NodeConnection, key_prefix: str) -> None:
    """A call without classes took what waited of b: its name takes up a turn, and d's comes all the same."""
    partition = PartitionHarness(connection, key_prefix)
    partition.create()
    partition.add(range(1, 6), lambda offset: (b"a/1", b"b/1", b"c/1", b"c/1", b"d/1")[offset - 1], body_at)
    assert given_alone(partition, "first") == b"a"
    assert given_to(partition, None, "second", 1) == [b"b"]
    assert given_to(partition, PopClasses(BY_PREFIX), "third", 2) == [b"c", b"d"]


def given_to(partition: PartitionHarness, classes: PopClasses | None, attempt: str, limit: int) -> list[bytes]:
    """Return the classes of the messages that a new receiver is given."""
    answer = partition.receiver("key", 1, classes=classes).receive(attempt, limit)
    assert isinstance(answer, PopBatch)
    return [record.key.partition(b"/")[0] for record in answer.records]


def given_alone(partition: PartitionHarness, attempt: str) -> bytes:
    """Return the class of the one message that a new receiver is given."""
    (given,) = given_to(partition, PopClasses(BY_PREFIX), attempt, 1)
    return given


@pytest.mark.parametrize("text", ["prefix:/", "prefix:::", "header:tenant", 'header:a"b'])
def test_a_node_finds_the_classes_that_members_find(connection: NodeConnection, key_prefix: str, text: str) -> None:
    """What waits by class is named by it; `KeyClassRule.of` says the class for members."""
    partition = PartitionHarness(connection, key_prefix)
    partition.create()
    told: list[dict[str, str]] = [
        {}, {"tenant": "acme"}, {"tenant": "\u00e9{"}, {"other": "tenant"}, {"tenant": "", "n": "1"}, {'a"b': "c"},
        {"tenant": "t" * 300},
    ]  # fmt: skip
    keys = [b"first", b"/x", b"a/1", b"a::b::c", b"\xc3\xa9/1/2", NO_KEY, b"a/\x00", b"k" * 300 + b"/1"]
    facts = [(key, headers) for key in keys for headers in told]
    records = [
        Record(
            offset, b"1:0:%d:" % offset + encode_facts(5, headers), key if key == NO_KEY else key + b"%d" % offset, b"b"
        )
        for offset, (key, headers) in enumerate(facts, start=1)
    ]
    partition.call(
        *(("XADD", partition.keys.log, f"{one.offset}-0", "m", one.m, "k", one.key, "b", one.body) for one in records),
        ("HSET", partition.keys.meta, "next", len(records) + 1),
    )
    answer = partition.receiver("key", 1, classes=PopClasses(rule_of(text))).receive("a", 1)
    assert isinstance(answer, PopBatch)
    names: list[bytes] = partition.call(("ZRANGE", partition.pops.ready, 0, -1))[0]
    found = {int(name[3 + int(name[:3]) :][:16]): name[3 : 3 + int(name[:3])] for name in names}
    given = answer.records[0].offset
    assert found == {one.offset: rule_of(text).of(one) for one in records if one.offset != given}


@pytest.mark.parametrize("classes", [None, PopClasses(BY_PREFIX)])
def test_records_that_are_gone_make_no_empty_answer(
    connection: NodeConnection, key_prefix: str, classes: PopClasses | None
) -> None:
    partition = PartitionHarness(connection, key_prefix)
    partition.create()
    partition.add([1, 2], key_at, body_at)
    partition.call(("DEL", partition.keys.log))
    assert partition.receiver("key", 1, classes=classes).receive("a", 2) == Refused("absent", "")


def test_nothing_of_a_retired_partition_is_left_but_its_tombstone(connection: NodeConnection, key_prefix: str) -> None:
    partition = PartitionHarness(connection, key_prefix)
    partition.create()
    partition.add([1, 2], key_at, body_at)
    receiver = partition.receiver("key", 1, classes=PopClasses(BY_PREFIX, 2, RateShare(1.0, 2.0, 1.0)))
    answer = receiver.receive("a", 1)
    assert isinstance(answer, PopBatch)
    receiver.settle("nack", [(answer.batch, answer.records[0].offset)])
    there = (*partition.group, *partition.pops)
    missing = [key for key in there if not partition.call(("EXISTS", key))[0]]
    assert missing == [partition.group.acks], "all but the ack bitmap"
    partition.retire()
    assert partition.call(("EXISTS", *there, partition.keys.log, partition.keys.marks)) == [0]
    assert receiver.receive("a", 2) == Refused("absent", "")
    assert receiver.settle("ack", [(answer.batch, 1)]) == Refused("absent", "")
