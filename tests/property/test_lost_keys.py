"""Any one or two of the keys that a partition and a group have on a node are removed, in each way to consume.

Case 42. Afterwards nothing counts as settled that nobody said so of, nothing is handed out before what comes before it
in its key, and the partition gets going again: by itself, or by `mqlayer node rearm`, which callers and `verify` name.
What dedup ids a partition knew is not held against it: docs/how-to/deduplicate.md says that they go with a node's data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final

import pytest

from mqlayer.doctor.findings import CheckStatus
from mqlayer.doctor.verify import verify
from mqlayer.domain.key_classes import key_class_rule
from mqlayer.domain.offsets import as_ranges
from mqlayer.domain.rates import RateShare
from mqlayer.errors import StoreUnavailable
from mqlayer.postgres.database import Database
from mqlayer.redis.keys import rate_key
from mqlayer.redis.node_connection import Command, NodeConnection
from mqlayer.redis.outcomes import encode_pop_outcome
from mqlayer.redis.partition_scripts import AppendReply, LockTaken
from mqlayer.redis.pop_scripts import PopBatch, PopClasses
from mqlayer.redis.shared_scripts import DeferredMessages, DueMessages, EpochInForce
from mqlayer.topics import create_topic, register_node
from mqlayer.topics.nodes import rearm_node
from tests.fixtures.partition_harness import KEYS, SOURCE, Book, PartitionHarness, all_handled, keyed_run
from tests.proof.runtimes import runtime_of

GROUP: Final = 1
FIRST, LAST = 12, 15
TURNS: Final = 60
PARTITION: Final = ("log", "meta", "marks", "ids", "ages")
NATIVE: Final = "native group"


@dataclass
class Lost(Book):
    """A partition of which some keys are removed, and what became of its messages: seqs 1 to LAST of one LP."""

    lp: int = 0
    names: tuple[str, ...] = ()
    epoch: int = 1
    absent: bool = False
    appended: int = 0
    seqs: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, connection: NodeConnection, prefix: str, partition: int, lp: int, names: tuple[str, ...], *, in_order: bool
    ) -> Lost:
        """Return one whose calls note where the node says that it does not have the partition."""

        def ask(make: Callable[[], Command]) -> Any:
            (reply,) = connection.call([make()])
            lost.absent = lost.absent or (isinstance(reply, list) and reply[:1] == [b"absent"])
            return reply

        lost = cls(
            PartitionHarness(connection, prefix, partition, group_id=GROUP, ask=ask), in_order, lp=lp, names=names
        )
        return lost

    def learn(self) -> None:
        """Look which message is at which offset: what is removed keeps its offsets until the node is armed."""
        entries = self.partition.entries()
        self.seqs |= {int(entry_id[:-2]): int(fields[1].split(b":")[2]) for entry_id, fields in entries}

    def append(self, upto: int) -> None:
        """Send what is missing up to a seq, as a relay: from behind the mark that the partition tells."""
        if not self.send(self.appended + 1, upto):
            (mark,) = self.partition.call(("HGET", self.partition.keys.marks, f"{SOURCE}:{self.lp}"))
            self.send(int(mark or 0) + 1, upto)

    def send(self, first: int, upto: int) -> bool:
        """Append seqs from one to another, if any; say whether they are there."""
        if first > upto:
            return True
        answer = self.partition.append(keyed_run(self.lp, first, upto + 1 - first))
        if isinstance(answer, AppendReply) and (answer.outcomes is None or answer.outcomes[0].status in ("ok", "dup")):
            self.appended = upto
        return self.appended == upto

    def handle_at(self, offsets: Sequence[int]) -> None:
        for offset in offsets:
            self.handle(self.seqs[offset])

    def say(self, offsets: Sequence[int]) -> None:
        """Note what is about to be settled."""
        self.said |= {self.seqs[offset] for offset in offsets}

    def messages_below(self, offset: int) -> set[int]:
        return {seq for at, seq in self.seqs.items() if at < offset}

    @property
    def done(self) -> bool:
        return self.committed == self.partition.next_offset and self.handled == set(range(1, LAST + 1))

    def remove(self) -> None:
        """Remove the keys."""
        at = self.partition
        named = {**at.keys._asdict(), **at.group._asdict(), **at.pops._asdict(), "outcomes": at.outcomes}
        named["rate"] = rate_key(at.prefix, at.number, GROUP)
        self.learn()
        for name in self.names:
            if name == NATIVE:
                at.destroy_native_group()
            else:
                at.call(("DEL", named[name]))


def member(lost: Lost, most: int) -> Callable[[], None]:
    """A member takes the partition and handles some messages of each key; return how it goes on later, as it was."""
    lost.epoch += 2
    scripts = lost.partition.member(f"m{lost.epoch}", lost.epoch)
    taken = scripts.acquire(afresh=True)
    if not isinstance(taken, LockTaken):
        return lambda: None
    todo = [offset for offset in range(1, taken.next_offset) if not taken.has_settled(offset)]
    settled = {lost.seqs[offset] for offset in lost.seqs if offset < taken.next_offset and taken.has_settled(offset)}
    assert settled <= lost.said, f"{sorted(settled - lost.said)} were never settled"
    todo.sort(key=lambda offset: (-(lost.seqs[offset] % KEYS), offset))

    def go_on(some: list[int]) -> None:
        for offset in some:
            scripts.count(offset, 1)
            lost.handle_at([offset])
            lost.say([offset])
            ranges = [(offset, offset)]
            scripts.settle(ranges, [offset], all_handled(ranges, offset))
            assert lost.committed

    go_on(todo[:most])
    return lambda: go_on(todo[most : most + 2])


def receiver(lost: Lost, most: int) -> Callable[[], None]:
    """A receiver is given a batch, and acknowledges some of it, the last first; the rest later."""
    return received(lost, most, None)


def receiver_by_class(lost: Lost, most: int) -> Callable[[], None]:
    """The same with two classes of keys, each with few keys out and a rate."""
    rule = key_class_rule("prefix:1")
    assert rule is not None
    return received(lost, most, PopClasses(rule, 2, RateShare(1e5, 1e5, 1.0)))


def received(lost: Lost, most: int, classes: PopClasses | None) -> Callable[[], None]:
    scripts = lost.partition.receiver("key", lost.epoch, classes=classes)
    answer = scripts.receive(f"a{len(lost.handled)}-{most}", most + 2, 1)
    if not isinstance(answer, PopBatch):
        return lambda: None
    lost.handle_at([record.offset for record in answer.records])

    def go_on(offsets: list[int]) -> None:
        for offset in offsets:
            lost.say([offset])
            scripts.settle("ack", [(answer.batch, offset)], told=encode_pop_outcome("r"))
            assert lost.committed

    given = [record.offset for record in answer.records][::-1]
    go_on(given[:most])
    return lambda: go_on(given[most:])


@contextmanager
def group_may_be_gone() -> Iterator[None]:
    """Let a call fail for want of the native group; nothing else may be wrong."""
    try:
        yield
    except StoreUnavailable as error:
        if "NOGROUP" not in str(error):
            raise


def sharer(lost: Lost, most: int) -> Callable[[], None]:
    """A member of a shared group settles some of what it reads, gives some back, and has the rest."""
    scripts = lost.partition.sharer("a", lost.epoch)
    if not isinstance(scripts.acquire(afresh=True), EpochInForce):
        return lambda: None
    offsets = [int(entry_id[:-2]) for entry_id, _ in scripts.read(most + 4, may_miss=True)]
    if not offsets:
        with group_may_be_gone():
            scripts.reclaim()
    again = scripts.due(5)
    offsets += [record.offset for record in again.records] if isinstance(again, DueMessages) else []
    waiting = scripts.deferred(2)
    offsets += [record.offset for record in waiting.due.records] if isinstance(waiting, DeferredMessages) else []

    def go_on(some: list[int]) -> None:
        lost.handle_at(some)
        lost.say(some)
        if some:
            ranges = as_ranges(sorted(some))
            with group_may_be_gone():
                scripts.settle(ranges, told=all_handled(ranges, some[-1]))
            assert lost.committed

    begin = int(len(offsets) > 1)
    settled, back, rest = offsets[begin : most + begin], offsets[:begin], offsets[most + begin :]
    go_on(settled)
    if back:
        with group_may_be_gone():
            scripts.nack([(offset, 1) for offset in back])
    if rest:
        with group_may_be_gone():
            scripts.defer([(rest[-1], b"a")])
    return lambda: go_on(rest)


Way = Callable[[Lost, int], Callable[[], None]]

WAYS: Final[dict[Way, tuple[str, ...]]] = {
    member: (*PARTITION, "lock", "acks", "attempts", "outcomes", "rate"),
    receiver: (
        *PARTITION, "lock", "acks", "attempts", "outcomes", "rate", "pops", "queues", "due", "batches", "wake",
    ),
    receiver_by_class: ("log", "lock", "acks", "queues", "due", "batches", "ready", "class_out", "class_rates"),
    sharer: (*PARTITION, "lock", "attempts", "outcomes", "rate", "due", "queues", NATIVE),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_is_left_of_a_partition_settles_nothing_and_gets_going_again(
    connection: NodeConnection,
    database_dsn: str,
    key_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    way: Way,
) -> None:
    """Each single key and each pair, in a partition of its own: half of its messages are consumed then."""
    names = [*combinations(WAYS[way], 1), *combinations(WAYS[way], 2)]
    monkeypatch.setattr("mqlayer.doctor.verify.run.MAX_SHOWN", 10_000)
    with Database(database_dsn) as database:
        register_node(runtime_of(database), name="n1", url=connection.node.url)
        route = create_topic(runtime_of(database, key_prefix), "orders", partitions=len(names))
        with database.connection() as control:
            control.execute(
                "INSERT INTO mqlayer.consumer_group (topic_id, name, start, backoff_s) "
                "VALUES (1, 'g', 'earliest', '{1}')"
            )
        cases = [
            Lost.of(connection, key_prefix, at.partition, at.lp_from, lost, in_order=way is not sharer)
            for at, lost in zip(route.ranges, names, strict=True)
        ]
        for case in cases:
            consume_half(case, way)
        told = {finding.subject for finding in verify(runtime_of(database, key_prefix, application=database), "orders")
                if finding.verdict is CheckStatus.BROKEN and "node rearm" in finding.fix}  # fmt: skip
        for case in cases:
            go_on_alone(case, way)
        unnamed = [case.names for case in cases if case.absent and f"partition {case.partition.number}" not in told]
        assert unnamed == [], "verify names the command for each that its node does not give out any more"
        rearm_node(runtime_of(database, key_prefix), "n1")
        for case in cases:
            go_on_armed(case, way)


def consume_half(case: Lost, way: Way) -> None:
    """Have some messages settled and others in hand, and remove the keys."""
    case.append(FIRST)
    case.learn()
    for most in (2, 3):
        way(case, most)
    late = way(case, 1)
    case.remove()
    late()


def go_on_alone(case: Lost, way: Way) -> None:
    """Go on as if nobody had noticed."""
    case.append(LAST)
    case.learn()
    for _ in range(TURNS):
        if case.absent or case.done:
            return
        way(case, 3)()
        case.append(LAST)
        case.learn()


def go_on_armed(case: Lost, way: Way) -> None:
    """Go on after the node was armed: what was removed of the records comes again from their sender."""
    is_gone = case.absent
    case.epoch += 10
    case.seqs.clear()
    case.appended = LAST if not is_gone else 0
    for _ in range(TURNS):
        case.append(LAST)
        case.learn()
        if case.done:
            return
        way(case, 3)()
    raise AssertionError(f"{case.names}: at {case.committed}, handled {sorted(case.handled)}")
