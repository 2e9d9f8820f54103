"""The consumers' scripts do what a plain model of one partition does, on every Redis on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from mqlayer.domain.offsets import is_settled
from mqlayer.errors import StoreUnavailable
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.outcomes import OutcomeId, OutcomeRange, encode_outcome, forget_command
from mqlayer.redis.partition_scripts import (
    FailureHistory,
    Fenced,
    LockKept,
    LockTaken,
    MessageRun,
    Refused,
    attempt_command,
    attempt_reply,
    failures_of,
)
from mqlayer.redis.read_scripts import FIND_LIMIT, UnsettledHead
from tests.fixtures.partition_harness import (
    GROUP,
    PartitionHarness,
    PartitionMachine,
    all_handled,
    in_ms,
    placed,
    run_machine,
)
from tests.fixtures.state_programs import Program, drawn, play
from tests.fixtures.wait import wait_until

WINDOW = 1_048_576
IN_HAND = 20_000
MEMBERS = ("a", "b")
KEPT = 4
"""How many entries wait to be fetched, here."""
REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
"""Bytes with their bits in reverse: in a bitmap of the server, the first bit of a byte is its highest."""


@dataclass
class Telling:
    """What one call told: bit i of a letter's number stands for offset i; when they were given by `early` and `ago`."""

    place: OutcomeId
    member: str
    said: dict[str, int] = field(default_factory=lambda: {"h": 0, "u": 0, "e": 0, "-": 0})
    failed: dict[int, int] = field(default_factory=dict)
    early: int = 0
    dropped: int = 0

    @property
    def count(self) -> int:
        return sum(self.said[letter].bit_count() for letter in "hue")

    def check(self, stretches: Sequence[OutcomeRange]) -> None:
        """Say that these stretches are this, divided where they have not all in common."""
        bits = {"handled": 0, "unmatched": 0, "expired": 0}
        for one in stretches:
            mask = (1 << one.last + 1) - (1 << one.first)
            assert not bits[one.outcome] & mask
            bits[one.outcome] |= mask
            if one.outcome == "handled":
                assert one.delivered_ms_ago == (40 if one.last <= self.early else 3)
                assert one.last <= self.early or one.first > self.early
        assert bits == {"handled": self.said["h"], "unmatched": self.said["u"], "expired": self.said["e"]}
        failed = {offset: count for offset, count in self.failed.items() if self.said["h"] >> offset & 1}
        assert {one.first: one.attempts - 1 for one in stretches if one.attempts > 1} == failed
        assert all(one.first == one.last for one in stretches if one.attempts > 1)


@dataclass
class Model:
    """One partition and one group at it, as a person would write it down."""

    next: int = 1
    first: int = 1
    owner: str | None = None
    epoch: int = 0
    committed: int = 0
    seek: int = 0
    # Bit i stands for offset i.
    settled: int = 0
    log: list[int] = field(default_factory=list)
    attempts: dict[int, int] = field(default_factory=dict)
    # What the server says of them, with times that only it knows.
    failures: dict[int, FailureHistory] = field(default_factory=dict)
    deaths: int = 0
    suspect: int = 0
    told: int = 0
    expired: int = 0
    tellings: list[Telling] = field(default_factory=list)

    def owns(self, member: str, epoch: int) -> bool:
        return (self.owner, self.epoch) == (member, epoch)

    def take(self, member: str, epoch: int, start: int, seek: int, *, afresh: bool) -> LockTaken | LockKept | Fenced:
        if self.owns(member, epoch):
            if not afresh:
                return LockKept(self.committed)
        elif epoch <= self.epoch:
            return Fenced(self.epoch)
        died = epoch > self.epoch and bool(self.owner)
        deaths = self.deaths if epoch == self.epoch else 0
        self.owner, self.epoch = member, epoch
        if seek > self.seek:
            self.seek, self.committed, self.settled, self.attempts, self.failures = seek, 0, 0, {}, {}
        self.committed = self.committed or max(start, self.first)
        # Noted late of what is settled already, or not forgotten with it: nobody handles that again.
        self.attempts = {offset: count for offset, count in self.attempts.items() if offset >= self.committed}
        self.failures = {offset: noted for offset, noted in self.failures.items() if offset >= self.committed}
        if died:
            deaths = self.deaths + 1 if self.committed < self.suspect else 1
            self.suspect = min(self.next, max(self.committed, self.settled.bit_length()) + IN_HAND)
        self.deaths = deaths
        suspects = {offset: failures.started for offset, failures in self.failures.items() if failures.started}
        return LockTaken(
            self.committed, self.next, 0, b"", self.attempts, self.suspect if deaths > 1 else 0, frozenset(suspects),
            frozenset(offset for offset, how in suspects.items() if how == "a"),
        )  # fmt: skip

    def settle(
        self, member: str, epoch: int, ranges: list[tuple[int, int]], forget: list[int], words: str, *, untold: bool
    ) -> LockKept | Fenced | Refused:
        if not self.owns(member, epoch):
            return Fenced(self.epoch)
        for _, last in ranges:
            if last >= self.next:
                return Refused("unknown", str(self.next))
            if last >= self.committed + WINDOW:
                return Refused("beyond", str(self.committed + WINDOW))
        telling = Telling(OutcomeId(epoch, self.told + 1), member, early=self.committed + 5)
        before = self.settled | (1 << self.committed) - 1
        for (first, last), word in zip(ranges, words or "-" * len(ranges), strict=True):
            telling.said[word] |= ((1 << last + 1) - (1 << first)) & ~before
            before |= (1 << last + 1) - (1 << first)
            self.settled |= (1 << last + 1) - (1 << first)
        telling.failed = {offset: self.attempts[offset] for offset in forget if self.attempts.get(offset)}
        self.expired += telling.said["e"].bit_count()
        if telling.count and not untold:
            self.tell(telling)
        unsettled = ~(self.settled >> self.committed)
        self.committed += (unsettled & -unsettled).bit_length() - 1
        for offset in forget:
            self.attempts.pop(offset, None)
            self.failures.pop(offset, None)
        return LockKept(self.committed)

    def tell(self, telling: Telling) -> None:
        while len(self.tellings) >= KEPT:
            oldest = self.tellings.pop(0)
            telling.dropped += oldest.count + oldest.dropped
        self.told += 1
        self.tellings.append(telling)

    def count(self, member: str, epoch: int, offset: int, attempts: int, *, given_back: bool = False) -> int | Fenced:
        if not self.owns(member, epoch):
            return Fenced(self.epoch)
        known = self.attempts.get(offset, 0)
        if attempts <= known if given_back else attempts > known:
            self.attempts[offset] = attempts
        return self.attempts.get(offset, 0)


class ConsumerScripts(PartitionMachine):
    """Calls of two members under any epochs, in any order, beside appends and trims."""

    def __init__(self) -> None:
        super().__init__()
        self.partition.create()
        self.model = Model()

    @rule(count=st.sampled_from([1, 2, 3, 10, 10_000]))
    def append(self, count: int) -> None:
        """Records, of many only the last ones: settling looks at numbers, not at the log."""
        self.model.next += count
        offsets = range(self.model.next - min(count, 10), self.model.next)
        self.partition.add(offsets, key_at)
        self.model.log += offsets

    @rule(
        member=st.sampled_from(MEMBERS),
        step=st.sampled_from([-1, 0, 0, 1, 1, 3]),
        start=st.integers(1, 5),
        seeks=st.sampled_from([0, 0, 0, 0, 1, 2]),
        afresh=st.booleans(),
    )
    def take(self, member: str, step: int, start: int, seeks: int, afresh: bool) -> None:
        epoch = max(1, self.model.epoch + step)
        start, seek = min(start, self.model.next), self.model.seek + seeks
        answer = self.partition.member(member, epoch).acquire(start=start, seek=seek, afresh=afresh)
        expected = self.model.take(member, epoch, start, seek, afresh=afresh)
        assert type(answer) is type(expected)
        if isinstance(answer, LockTaken) and isinstance(expected, LockTaken):
            assert answer._replace(base=0, bits=b"") == expected
            self.check_bits(answer.base, answer.bits)
        else:
            assert answer == expected

    def settle(
        self,
        ranges: list[tuple[int, int]],
        forget: list[int],
        epoch_step: int = 0,
        words: str = "",
        *,
        untold: bool = False,
    ) -> None:
        member, epoch = self.model.owner or "a", self.model.epoch + epoch_step
        reads = [(self.model.committed + 5, 40), (self.model.next + 20, 3)]
        told = encode_outcome(words, reads, max_entries=0 if untold else KEPT) if words else b""
        answer = self.partition.member(member, epoch).settle(ranges, forget, told)
        assert answer == self.model.settle(member, epoch, ranges, forget, words, untold=untold)

    @precondition(lambda self: self.model.tellings)
    @rule(data=st.data())
    def fetch(self, data: st.DataObject) -> None:
        """An archiver has some of what was told, the oldest first; the node drops that."""
        upto = data.draw(st.sampled_from([telling.place for telling in self.model.tellings]))
        self.partition.call(forget_command(self.prefix, self.partition.number, GROUP, upto))
        self.model.tellings = [telling for telling in self.model.tellings if telling.place > upto]

    @precondition(lambda self: self.model.committed)
    @rule(data=st.data(), epoch_step=st.sampled_from([0, 0, 0, 0, -1, 1]))
    def settle_any(self, data: st.DataObject, epoch_step: int) -> None:
        """Below committed, above it, twice, overlapping, now and then unknown; by the owner or not."""
        low, high = max(1, self.model.committed - 3), self.model.next
        first = st.integers(low, min(high, low + 30)) | st.integers(low, high)
        pair = first.flatmap(lambda begin: st.tuples(st.just(begin), st.integers(begin, min(high, begin + 12))))
        ranges = data.draw(st.lists(pair, min_size=1, max_size=6))
        forget = data.draw(st.lists(st.integers(low, high), max_size=3, unique=True))
        words = data.draw(st.lists(st.sampled_from("hhhue-"), min_size=len(ranges), max_size=len(ranges)))
        said = data.draw(st.sampled_from(["".join(words), ""]))
        self.settle(ranges, forget, epoch_step, said, untold=data.draw(st.booleans()))

    @precondition(lambda self: self.model.next - self.model.committed > 1)
    @rule(words=st.sampled_from(["", "h", "u", "e"]))
    def settle_all_behind_the_head(self, words: str) -> None:
        self.settle([(self.model.committed + 1, self.model.next - 1)], [], words=words)

    @precondition(lambda self: len(self.waiting()) > 2)
    @rule(count=st.sampled_from([2, 9, 11]), again=st.booleans())
    def settle_one_by_one(self, count: int, again: bool) -> None:
        """More calls than entries are kept: what one dropped counts on when it is dropped itself."""
        for offset in self.owned()[1::2][:count]:
            for _ in range(1 + again):
                self.settle([(offset, offset)], [], words="h")

    @precondition(lambda self: len(self.waiting()) > 2)
    @rule(data=st.data())
    def settle_in_any_order(self, data: st.DataObject) -> None:
        """Ranges that have nothing in common, and those of the call before once more."""
        if waiting := self.owned()[1:12:2]:
            ranges = [(offset, offset) for offset in data.draw(st.permutations(waiting))]
            for _ in range(2):
                self.settle(ranges, [], words="h" * len(ranges))

    @precondition(lambda self: self.waiting())
    @rule(attempts=st.integers(1, 4), place=st.integers(0, 3))
    def fail_and_settle(self, attempts: int, place: int) -> None:
        """The attempts that failed go along with what is told, and are forgotten."""
        if waiting := self.owned():
            offset = waiting[-1 - place % len(waiting)]
            self.count(self.model.owner or "", 0, offset, attempts)
            self.settle([(offset, offset)], [offset], words="h")

    def waiting(self) -> list[int]:
        """Return the first offsets from committed on that are not settled."""
        offsets = range(max(1, self.model.committed), min(self.model.next, self.model.committed + 40))
        return [offset for offset in offsets if not self.model.settled >> offset & 1]

    def owned(self) -> list[int]:
        """Let somebody own the partition; return what waits then: the first owner begins behind what was trimmed."""
        if not self.model.owner:
            self.take("a", 1, 1, 0, afresh=False)
        return self.waiting()

    @precondition(lambda self: self.model.next > self.model.committed > 0)
    @rule(words=st.sampled_from(["", "h", "-"]))
    def settle_the_head(self, words: str) -> None:
        self.settle([(self.model.committed, self.model.committed)], [], words=words)

    @rule(member=st.sampled_from(MEMBERS), step=st.sampled_from([0, 0, -1, 1]))
    def release(self, member: str, step: int) -> None:
        epoch = self.model.epoch + step
        reply = self.partition.member(member, epoch).release()
        if self.model.owns(member, epoch):
            assert reply == [b"released"]
            self.model.owner = ""
        else:
            assert reply == [b"fenced", self.model.epoch]

    @rule(
        member=st.sampled_from(MEMBERS),
        step=st.sampled_from([0, 0, 0, -1]),
        offset=st.integers(1, 8),
        attempts=st.integers(1, 4),
        given_back=st.sampled_from([False, False, True]),
    )
    def count(self, member: str, step: int, offset: int, attempts: int, given_back: bool = False) -> None:
        epoch = self.model.epoch + step
        holder = self.partition.member(member, epoch).holder
        command = attempt_command(self.connection, holder, offset, attempts, given_back=given_back)
        noted = ("HGET", self.partition.group.attempts, offset)
        before, counted, value, after = self.partition.call(("TIME",), command, noted, ("TIME",))
        known = self.model.failures.get(offset)
        answer = self.model.count(member, epoch, offset, attempts, given_back=given_back)
        assert attempt_reply(counted, "") == answer
        so_far = 0 if known is None else known.attempts
        if isinstance(answer, Fenced) or (attempts > so_far if given_back else attempts <= so_far):
            assert (None if value is None else failures_of(value)) == known
            return
        found = self.model.failures[offset] = failures_of(value)
        assert in_ms(before) <= (found.last_ms or 0) <= in_ms(after)
        first_ms = known.first_ms if known and known.attempts else found.last_ms
        assert found == (attempts, first_ms, found.last_ms, "")

    @rule(
        member=st.sampled_from(MEMBERS),
        step=st.sampled_from([0, 0, 0, -1]),
        offset=st.integers(1, 8),
        alone=st.booleans(),
    )
    def start(self, member: str, step: int, offset: int, alone: bool) -> None:
        """Before a message is handled, where former owners died."""
        epoch = self.model.epoch + step
        answer = self.partition.member(member, epoch).start(offset, alone=alone)
        if not self.model.owns(member, epoch):
            assert answer == Fenced(self.model.epoch)
            return
        assert answer is None
        self.model.attempts.setdefault(offset, 0)
        known = self.model.failures.get(offset, FailureHistory(0, None, None))
        self.model.failures[offset] = known._replace(started="a" if alone else "s")

    @rule(step=st.sampled_from([-1, 0, 1, 2, 5]))
    def raise_epoch(self, step: int) -> None:
        epoch = max(1, self.model.epoch + step)
        reply = self.partition.fence(epoch)
        if self.model.epoch >= epoch:
            assert reply == [b"unchanged", self.model.epoch]
        else:
            assert reply == [b"fenced_off"]
            self.model.owner, self.model.epoch = "", epoch - 1

    @rule(seeks=st.sampled_from([-1, 0, 0, 1]), start=st.integers(1, 5), key=st.sampled_from([b"k0", b"k1", b"k2"]),
          skip=st.integers(0, 3), count=st.sampled_from([1, 7, FIND_LIMIT]))  # fmt: skip
    def position(self, seeks: int, start: int, key: bytes, skip: int, count: int) -> None:
        """Looking tells what the next owner would be given, and changes nothing (see the invariant)."""
        seek = self.model.seek + seeks
        begun = self.model.committed and seeks <= 0
        position = self.model.committed if begun else max(min(start, self.model.next), self.model.first)
        settled = self.model.settled if begun else 0
        waiting = [offset for offset in self.model.log if offset >= position and not settled >> offset & 1]
        above = [offset for offset in self.model.log if offset >= position]
        look = self.partition.position(start=start, seek=seek)
        assert look is not None
        assert look[1:-1] == (
            self.model.next, position, (settled >> position).bit_count(), self.model.owner or "", self.model.epoch,
        )  # fmt: skip
        assert look.head == (self.head(above[0]) if above else None)
        first = position + skip
        of_key = [offset for offset in waiting if first <= offset < first + count and key_at(offset) == key]
        head = self.head(of_key[0]) if of_key else None
        assert self.partition.find(key, first=first, count=count, seek=seek) == (len(of_key), head)

    def head(self, offset: int) -> UnsettledHead:
        failures = self.model.failures.get(offset)
        return UnsettledHead(
            offset, b"1:0:%d:0" % offset, key_at(offset), failures if failures and failures.attempts else None
        )

    @rule(
        floor=st.integers(1, 20_000),
        limit=st.sampled_from([100, 5_000]),
        seeks=st.sampled_from([-1, 0, 0, 0, 1]),
        start=st.integers(1, 5),
    )
    def trim(self, floor: int, limit: int, seeks: int, start: int) -> None:
        """What was committed counts where it was since the group's last seek, else where it starts."""
        place = self.model.committed if self.model.committed and seeks <= 0 else start
        settled_by_all = [offset for offset in self.model.log if offset < min(floor, place)]
        word, count, first, expired = self.partition.trim(floor, start=start, seek=self.model.seek + seeks, limit=limit)
        assert (word, expired) == (b"trimmed", self.model.expired)
        assert count <= len(settled_by_all)
        self.model.log = self.model.log[count:]
        assert first == (self.model.log[0] if self.model.log else self.model.next)
        self.model.first = first

    @invariant()
    def the_servers_state_is_the_models(self) -> None:
        group = self.partition.group
        (owner, epoch, committed, base), bits, attempts, length = self.partition.call(
            ("HMGET", group.lock, "owner", "epoch", "committed", "base"),
            ("GET", group.acks),
            ("HGETALL", group.attempts),
            ("XLEN", self.partition.keys.log),
        )
        assert (owner.decode() if owner is not None else None, int(epoch or 0)) == (self.model.owner, self.model.epoch)
        assert int(committed or 0) == self.model.committed
        self.check_bits(int(base or 0), bits or b"")
        assert len(bits or b"") <= WINDOW // 8 + 2048
        pairs = zip(attempts[::2], attempts[1::2], strict=True)
        noted = {int(offset): failures_of(value) for offset, value in pairs}
        assert {offset: failures.attempts for offset, failures in noted.items()} == self.model.attempts
        assert noted == self.model.failures
        assert length == len(self.model.log)

    @invariant()
    def each_offset_is_told_by_the_call_that_settled_it(self) -> None:
        entries = self.partition.told()
        told = [(telling.place, telling.member, telling.dropped) for telling in self.model.tellings]
        assert [(entry.entry_id, entry.member, entry.dropped) for entry in entries] == told
        for entry, telling in zip(entries, self.model.tellings, strict=True):
            telling.check(entry.ranges)

    def check_bits(self, base: int, bits: bytes) -> None:
        theirs = int.from_bytes(bits.translate(REVERSED), "little") << base
        assert theirs >> self.model.committed == self.model.settled >> self.model.committed


def key_at(offset: int) -> bytes:
    """Return the key of the message at an offset."""
    return b"k%d" % (offset % 3)


def fail_and_settle_after_a_trim(state: ConsumerScripts) -> None:
    """The group begins behind what was trimmed, so that nothing waits there any more."""
    state.position(count=1, key=b"k0", seeks=0, skip=0, start=1)
    state.append(count=1)
    state.trim(floor=2, limit=100, seeks=0, start=2)
    state.fail_and_settle(attempts=1, place=0)


def settle_in_any_order_after_a_trim(state: ConsumerScripts) -> None:
    """The same, of several messages at once."""
    state.append(count=3)
    state.trim(floor=4, limit=100, seeks=0, start=4)
    state.settle_in_any_order(data=drawn([]))


def settle_one_by_one_after_a_trim(state: ConsumerScripts) -> None:
    """The same, call by call."""
    state.append(count=3)
    state.trim(floor=4, limit=100, seeks=0, start=4)
    state.settle_one_by_one(count=2, again=False)


def take_after_a_count_below_committed(state: ConsumerScripts) -> None:
    """An attempt is noted of what is settled already: the next owner is told nothing of it."""
    state.append(count=1)
    state.take(afresh=False, member="a", seeks=0, start=1, step=-1)
    state.settle_the_head(words="")
    state.count(attempts=1, member="a", offset=1, step=0)
    state.take(afresh=False, member="a", seeks=0, start=1, step=1)


def take_after_a_start_below_committed(state: ConsumerScripts) -> None:
    """The same, of the note that it is begun."""
    state.append(count=1)
    state.take(afresh=False, member="a", seeks=0, start=1, step=-1)
    state.settle_the_head(words="")
    state.start(alone=True, member="a", offset=1, step=0)
    state.take(afresh=False, member="a", seeks=0, start=1, step=1)


PROGRAMS: list[Program[ConsumerScripts]] = [
    fail_and_settle_after_a_trim,
    settle_in_any_order_after_a_trim,
    settle_one_by_one_after_a_trim,
    take_after_a_count_below_committed,
    take_after_a_start_below_committed,
]
"""What chance found once, and what is of its kind."""


def test_members_calls_in_any_order_leave_what_the_model_leaves(connection: NodeConnection, key_prefix: str) -> None:
    run_machine(placed(ConsumerScripts, connection, key_prefix))


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_chance_found_once_leaves_what_the_model_leaves(
    connection: NodeConnection, key_prefix: str, program: Program[ConsumerScripts]
) -> None:
    play(placed(ConsumerScripts, connection, key_prefix), program)


class OwnedHarness(PartitionHarness):
    """A partition that one member owns, with messages of one key; `far`: with the last of these only."""

    def __init__(self, connection: NodeConnection, prefix: str, count: int, *, far: bool = True) -> None:
        super().__init__(connection, prefix)
        self.owner = self.member("a", 5)
        self.create()
        if far:
            self.add([count])
        else:
            self.append(MessageRun(0, 1, count, [b"0", b"k", b"b"] * count), source=5)
        self.take()

    def take(self) -> LockTaken:
        answer = self.owner.acquire(afresh=True)
        assert isinstance(answer, LockTaken)
        return answer

    def settle(self, *ranges: tuple[int, int]) -> object:
        return self.owner.settle(ranges)

    def settle_and_tell(self, ranges: list[tuple[int, int]]) -> None:
        self.owner.settle(ranges, told=all_handled(ranges, 1_000))


def test_the_bitmap_is_cut_when_many_offsets_behind_a_blocked_head_are_settled(
    connection: NodeConnection, key_prefix: str
) -> None:
    """Cases 51 and 54: committed jumps over all that is settled, and what is spent of the bitmap is dropped."""
    partition = OwnedHarness(connection, key_prefix, 200_000)
    assert partition.settle((2, 90_000), (90_002, 100_000)) == LockKept(1)
    assert partition.settle((1, 1)) == LockKept(90_001)
    taken = partition.take()
    assert taken.base > 80_000
    assert len(taken.bits) < 1_500
    assert all(is_settled(offset, taken.base, taken.bits) for offset in range(90_002, 100_001))
    assert partition.settle((100_500, 200_000)) == LockKept(90_001)
    assert partition.settle((90_001, 90_001), (100_001, 100_499)) == LockKept(200_001)
    assert partition.call(("EXISTS", partition.group.acks)) == [0]


def test_offsets_beyond_the_window_are_refused_and_nothing_is_changed(
    connection: NodeConnection, key_prefix: str
) -> None:
    partition = OwnedHarness(connection, key_prefix, 3 * WINDOW - 1)
    assert partition.settle((5, 5), (WINDOW + 1, WINDOW + 1)) == Refused("beyond", str(WINDOW + 1))
    assert partition.take().bits == b""
    assert partition.settle((2, WINDOW)) == LockKept(1)
    assert len(partition.take().bits) == WINDOW // 8
    assert partition.settle((1, 1)) == LockKept(WINDOW + 1)


def test_looking_passes_over_a_command_record_and_says_where_there_is_no_partition(
    connection: NodeConnection, key_prefix: str
) -> None:
    partition = PartitionHarness(connection, key_prefix)
    assert partition.position() is None
    partition.create()
    partition.append(MessageRun(0, 1, 1, [b"0", b"k", b"b"]), source=5)
    partition.seal()
    found = partition.position()
    assert found is not None
    assert (found.unsettled, found.head) == (1, UnsettledHead(1, b"5:0:1:0", b"k", None))
    assert partition.find(b"12").messages == 0
    partition.member("a", 5).acquire()
    partition.member("a", 5).settle([(1, 1)])
    found = partition.position()
    assert found is not None
    assert (found.unsettled, found.owner, found.epoch, found.head) == (0, "a", 5, None)
    partition.retire()
    assert partition.position() is None


def test_looking_counts_only_what_is_settled_above_the_head_and_finds_nothing_below_it(
    connection: NodeConnection, key_prefix: str
) -> None:
    partition = OwnedHarness(connection, key_prefix, 9, far=False)
    # Settled; then the first offset that is not, how many above it are, and how many of the key are not.
    for ranges, position, above, left in (
        ([(1, 1)], 2, 0, 8),
        ([(3, 4), (6, 6)], 2, 3, 5),
        ([(2, 2)], 5, 1, 4),
        ([(5, 5), (7, 9)], 10, 0, 0),
    ):
        partition.settle(*ranges)
        found = partition.position()
        assert found is not None
        assert (found.position, found.settled, found.unsettled) == (position, above, left)
        of_key = partition.find(b"k")
        assert (of_key.messages, of_key.head and of_key.head.offset) == (left, position if left else None)


def test_failures_keep_the_time_of_the_first_and_a_repeated_call_moves_no_time(
    connection: NodeConnection, key_prefix: str
) -> None:
    partition = OwnedHarness(connection, key_prefix, 1)

    def count(attempts: int) -> FailureHistory:
        partition.owner.count(1, attempts)
        return failures_of(partition.call(("HGET", partition.group.attempts, 1))[0])

    def is_later() -> bool:
        return in_ms(connection.call([("TIME",)])[0]) > (first.last_ms or 0)

    first = count(1)
    wait_until(is_later, what="a later millisecond of the server")
    assert count(1) == first == FailureHistory(1, first.last_ms, first.last_ms)
    second = count(2)
    assert second[:2] == (2, first.first_ms)
    assert (second.last_ms or 0) > (first.last_ms or 0)
    assert count(1) == second


@pytest.mark.parametrize("count", [0, FIND_LIMIT + 1])
def test_a_search_is_bounded(connection: NodeConnection, key_prefix: str, count: int) -> None:
    with pytest.raises(StoreUnavailable, match="1 to 1000 offsets"):
        PartitionHarness(connection, key_prefix).find(b"k", count=count)


def test_what_was_settled_by_whole_bytes_is_not_told_again(connection: NodeConnection, key_prefix: str) -> None:
    """Single offsets far above a blocked head first, then all at once: each is told once, by its own call."""
    partition = OwnedHarness(connection, key_prefix, 1_000)
    single = [(offset, offset) for offset in range(30, 900, 7)]
    for ranges in (single, [(2, 1_000)], [(1, 1_000)]):
        partition.settle_and_tell(ranges)
    first, second, third = partition.told()
    offsets = [offset for one in second.ranges for offset in range(one.first, one.last + 1)]
    assert [(one.first, one.last) for one in first.ranges] == single
    assert offsets == sorted({*range(2, 1_001)} - {one for one, _ in single})
    assert third.ranges == [OutcomeRange(1, 1, "handled", 1, 1)]


@pytest.mark.parametrize("kept", [True, False])
def test_retiring_leaves_what_is_told_until_it_is_fetched(
    connection: NodeConnection, key_prefix: str, kept: bool
) -> None:
    """Of an archived topic; of another one nothing is left but the tombstone."""
    partition = OwnedHarness(connection, key_prefix, 10)
    partition.settle_and_tell([(1, 10)])
    assert partition.retire(archived=kept, groups=[8]) == ([b"unfetched", 1] if kept else [b"retired"])
    left = partition.call(("HGETALL", partition.keys.meta), ("EXISTS", partition.outcomes))
    assert left == [[b"state", b"deleted"], int(kept)]
    partition.call(forget_command(key_prefix, 1, GROUP, OutcomeId(5, 1)))
    assert partition.retire(archived=kept, groups=[8]) == [b"retired"]
    assert partition.call(("EXISTS", partition.outcomes)) == [0]


def test_what_is_settled_again_above_a_blocked_head_is_not_told_again(
    connection: NodeConnection, key_prefix: str
) -> None:
    """Bit by bit: at the edges of a range, within one call and over calls."""
    partition = OwnedHarness(connection, key_prefix, 100)
    for ranges in ([(5, 6), (6, 7)], [(4, 9)], [(4, 9)]):
        partition.settle_and_tell(ranges)
    entries = partition.told()
    assert [[one[:2] for one in entry.ranges] for entry in entries] == [[(5, 7)], [(4, 4), (8, 9)]]
