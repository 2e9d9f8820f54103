"""The scripts of shared groups do what a plain model of one partition and one group does, on every Redis here.

Cases 50 to 54 as far as they go without order: committed is the first offset that is not settled, whoever settles what
in whatever order; nothing is given to two members at a time, and nothing is lost.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from mqlayer.domain.message import records_of
from mqlayer.domain.offsets import as_ranges
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import Fenced, Refused
from mqlayer.redis.shared_scripts import DueMessages, EpochInForce, SharedSettled
from tests.fixtures.partition_harness import PartitionMachine, SharerScripts, placed, run_machine

MEMBERS = ("a", "b", "c")
members = st.sampled_from(MEMBERS)


class SharedScripts(PartitionMachine):
    """Members that read, settle, give back and vanish, beside appends and arming."""

    def __init__(self) -> None:
        super().__init__()
        self.partition.create()
        self.epoch = self.next = 1
        # Offset -> who has it, "-" for nobody; what is not here and was read is settled.
        self.out: dict[int, str] = {}
        self.read_upto = 1
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
        # What nobody was given as yet can't be settled.
        assert answer == SharedSettled(self.committed, len(settled))

    @rule(member=members, data=st.data(), failed=st.sampled_from([None, 1, 3]))
    def back(self, member: str, data: st.DataObject, failed: int | None) -> None:
        offsets = data.draw(st.sets(st.integers(1, self.next), min_size=1, max_size=6))
        mine = [offset for offset in offsets if self.out.get(offset) == member]
        assert self.sharer(member).nack([(offset, failed) for offset in offsets]) == len(mine)
        self.out |= dict.fromkeys(mine, "-")

    @rule(member=members, limit=st.integers(1, 10))
    def again(self, member: str, limit: int) -> None:
        answer = self.sharer(member).due(limit)
        assert isinstance(answer, DueMessages)
        offsets = {record.offset for record in answer.records}
        assert offsets <= {offset for offset, who in self.out.items() if who == "-"}
        assert len(offsets) == min(limit, sum(who == "-" for who in self.out.values()))
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
        self.take()

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
