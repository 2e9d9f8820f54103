"""The scripts of shared groups do what a plain model of one partition and one group does, on every Redis here.

Cases 50 to 54 as far as they go without order: committed is the first offset that is not settled, whoever settles what
in whatever order; nothing is given to two members at a time, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from mqlayer.domain.message import records_of
from mqlayer.domain.offsets import as_ranges
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import Fenced, Refused
from mqlayer.redis.shared_scripts import DeferredMessages, DueMessages, EpochInForce, SharedSettled
from tests.fixtures.partition_harness import PartitionMachine, SharerScripts, placed, run_machine

MEMBERS = ("a", "b", "c")
CLASSES = (b"", b"t", b"t:")
members = st.sampled_from(MEMBERS)


def class_of(offset: int) -> bytes:
    """Return the class of a message here."""
    return CLASSES[offset % len(CLASSES)]


class SharedScripts(PartitionMachine):
    """Members that read, settle, give back and vanish, beside appends and arming."""

    def __init__(self) -> None:
        super().__init__()
        self.partition.create()
        self.epoch = self.next = 1
        # Offset -> who has it, "-" for nobody; what is not here and was read is settled.
        self.out: dict[int, str] = {}
        # Offset -> class of what is with nobody until its class's turn.
        self.deferred: dict[int, bytes] = {}
        self.read_upto = 1
        # Whether the index of deferred messages may name others.
        self.stale = False
        self.take()

    def sharer(self, member: str = "a", *, epoch: int | None = None) -> SharerScripts:
        return self.partition.sharer(member, epoch or self.epoch)

    def take(self) -> None:
        answer = self.sharer().acquire(afresh=True)
        assert isinstance(answer, EpochInForce)
        assert (answer.committed, answer.newly_acquired) == (self.committed, True)

    @property
    def committed(self) -> int:
        """The first offset that is not settled."""
        return min([*self.out, self.read_upto])

    @rule(count=st.sampled_from([1, 2, 5, 12]))
    def append(self, count: int) -> None:
        self.partition.add(range(self.next, self.next + count))
        self.next += count

    @rule(member=members, count=st.integers(1, 8))
    def read(self, member: str, count: int) -> None:
        offsets = [record.offset for record in records_of(self.sharer(member).read(count))]
        assert offsets == list(range(self.read_upto, min(self.next, self.read_upto + count)))
        self.out |= dict.fromkeys(offsets, member)
        self.read_upto += len(offsets)

    @rule(member=members, data=st.data(), old=st.booleans())
    def settle(self, member: str, data: st.DataObject, old: bool) -> None:
        if self.next == 1:
            return
        offsets = data.draw(st.sets(st.integers(1, self.next - 1), min_size=1, max_size=6))
        epoch = self.epoch - 1 if old else self.epoch
        answer = self.sharer(member, epoch=epoch or 99).settle(as_ranges(offsets))
        if old:
            assert answer == Fenced(self.epoch)
            return
        settled = [offset for offset in offsets if self.out.pop(offset, None)]
        self.defer_no_more(offsets)
        # What nobody was given as yet can't be settled.
        assert answer == SharedSettled(self.committed, len(settled))

    @rule(member=members, data=st.data(), failed=st.sampled_from([None, 1, 3]))
    def back(self, member: str, data: st.DataObject, failed: int | None) -> None:
        offsets = data.draw(st.sets(st.integers(1, self.next), min_size=1, max_size=6))
        mine = [offset for offset in offsets if self.out.get(offset) == member]
        assert self.sharer(member).nack([(offset, failed) for offset in offsets]) == len(mine)
        self.out |= dict.fromkeys(mine, "-")
        self.defer_no_more(mine)

    @rule(member=members, data=st.data())
    def defer(self, member: str, data: st.DataObject) -> None:
        """Of three classes, one of which begins as another one does."""
        offsets = data.draw(st.sets(st.integers(1, self.next), min_size=1, max_size=6))
        mine = [offset for offset in offsets if self.out.get(offset) == member]
        assert self.sharer(member).defer([(offset, class_of(offset)) for offset in offsets]) == len(mine)
        self.out |= dict.fromkeys(mine, "-")
        self.deferred |= {offset: class_of(offset) for offset in mine}

    @rule(
        member=members, limit=st.integers(1, 10), each=st.integers(0, 3), closed=st.sets(st.sampled_from(CLASSES)),
        after=st.sampled_from(["", *CLASSES]),
    )  # fmt: skip
    def take_deferred(self, member: str, limit: int, each: int, closed: set[bytes], after: str | bytes) -> None:
        """Each class gives its first ones, up to its limit, as many as there are."""
        begin = b"%03d%b" % (len(after), after) if isinstance(after, bytes) else b""
        answer = self.sharer(member).deferred(limit, each=each, after=begin, named=[(name, 0) for name in closed])
        assert isinstance(answer, DeferredMessages)
        offsets = [record.offset for record in answer.due.records]
        assert not answer.due.missing
        names = sorted(CLASSES, key=lambda name: (len(name), name))
        place = names.index(after) + 1 if isinstance(after, bytes) else 0
        expected: list[int] = []
        for name in names[place:] + names[:place]:
            of_class = sorted(offset for offset, one in self.deferred.items() if one == name)
            expected += of_class[: min(0 if name in closed else each, limit - len(expected))]
        # The index may name some that are deferred no more: then fewer are given, and they are dropped.
        assert set(offsets) <= set(self.deferred)
        if not self.stale:
            assert offsets == expected or sorted(offsets) == sorted(expected)
            assert answer.left == len(self.deferred) - len(offsets)
        self.stale = self.stale and answer.left > 0
        self.defer_no_more(offsets, taken=True)
        self.out |= dict.fromkeys(offsets, member)

    def defer_no_more(self, offsets: Iterable[int], *, taken: bool = False) -> None:
        for offset in offsets:
            self.stale = (bool(self.deferred.pop(offset, None)) and not taken) or self.stale

    @rule(member=members, limit=st.integers(1, 10))
    def again(self, member: str, limit: int) -> None:
        answer = self.sharer(member).due(limit)
        assert isinstance(answer, DueMessages)
        offsets = {record.offset for record in answer.records}
        waiting = {offset for offset, who in self.out.items() if who == "-" and offset not in self.deferred}
        assert offsets <= waiting
        assert len(offsets) == min(limit, len(waiting))
        self.out |= dict.fromkeys(offsets, member)

    @rule(member=members, data=st.data())
    def keep(self, member: str, data: st.DataObject) -> None:
        offsets = sorted(data.draw(st.sets(st.integers(1, self.next), min_size=1, max_size=6)))
        answer = self.sharer(member).extend(offsets)
        assert answer == [offset for offset in offsets if self.out.get(offset) != member]

    @rule()
    def reclaim(self) -> None:
        """Of all members."""
        held = [offset for offset, who in self.out.items() if who != "-"]
        assert self.sharer().reclaim() == len(held)
        self.out = dict.fromkeys(self.out, "-")

    @rule()
    def arm(self) -> None:
        self.epoch += 2
        self.partition.fence(self.epoch)
        self.take()

    @rule()
    def lose_the_native_group(self) -> None:
        """Somebody destroys it: what is not settled comes again, and so does what was settled above that."""
        committed = self.committed
        self.partition.destroy_native_group()
        assert self.sharer().reclaim() == Refused("missing", "")
        self.out, self.read_upto = {}, committed
        self.deferred, self.stale = {}, False
        self.take()

    @rule()
    def lose_the_index(self) -> None:
        """Somebody removes it: all that is deferred is due then, as nobody could find it by its class."""
        lost = len(self.deferred)
        self.partition.call(("DEL", self.partition.pops.queues))
        held = [offset for offset, who in self.out.items() if who != "-"]
        assert self.sharer().reclaim() == len(held) + lost
        self.out = dict.fromkeys(self.out, "-")
        self.deferred, self.stale = {}, False

    @invariant()
    def the_look_agrees(self) -> None:
        look = self.partition.position()
        assert look is not None
        assert (look.position, look.unsettled) == (self.committed, self.next - self.read_upto + len(self.out))


def test_scripts_and_model_agree(connection: NodeConnection, key_prefix: str) -> None:
    run_machine(placed(SharedScripts, connection, key_prefix))


def test_what_was_back_of_a_native_group_that_is_gone_is_not_taken_from_whoever_reads_it(
    connection: NodeConnection, key_prefix: str
) -> None:
    here = placed(SharedScripts, connection, key_prefix)()
    here.append(2)
    here.read("a", 2)
    assert here.sharer("a").nack([(1, 1)]) == 1
    here.lose_the_native_group()
    here.read("b", 2)
    here.again("c", 10)
    here.the_look_agrees()
