"""Any one or two of the keys that a partition and a group have on a node are removed, in each way to consume.

Case 42. Afterwards nothing counts as settled that nobody said so of, nothing is handed out before what comes before it
in its key, and the partition gets going again: by itself, or by `mqlayer node rearm`, which callers and `verify` name.
What dedup ids a partition knew is not held against it: docs/how-to/deduplicate.md says that they go with a node's data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Final

import pytest

from mqlayer.doctor.findings import CheckStatus
from mqlayer.doctor.verify import verify
from mqlayer.domain.offsets import as_ranges
from mqlayer.domain.routing import NodeId
from mqlayer.postgres.database import Database
from mqlayer.redis.keys import group_keys, outcomes_key, partition_keys, pop_keys, rate_key
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.outcomes import encode_outcome, encode_pop_outcome
from mqlayer.redis.partition_scripts import (
    AppendReply,
    LockHolder,
    LockTaken,
    MessageRun,
    acquire_command,
    acquire_reply,
    append_command,
    append_reply,
    attempt_command,
    settle_command,
)
from mqlayer.redis.pop_scripts import (
    PopBatch,
    PopGroupPartition,
    ReceiveRequest,
    pop_settle_command,
    receive_command,
    receive_reply,
)
from mqlayer.redis.shared_scripts import (
    DueMessages,
    EpochInForce,
    SharedGroupPartition,
    shared_acquire_command,
    shared_acquire_reply,
    shared_due_command,
    shared_due_reply,
    shared_nack_command,
    shared_read_command,
    shared_reclaim_command,
    shared_settle_command,
)
from mqlayer.stack import RedisServer
from mqlayer.topics import create_topic, register_node
from mqlayer.topics.nodes import rearm_node
from tests.proof.runtimes import runtime_of

GROUP: Final = 1
SOURCE: Final = 3
KEYS: Final = 3
FIRST, LAST = 12, 15
TURNS: Final = 60
PARTITION: Final = ("log", "meta", "marks", "ids", "ages")
NATIVE: Final = "native group"


@dataclass
class Lost:
    """A partition of which some keys are removed, and what became of its messages: seqs 1 to LAST of one LP."""

    connection: NodeConnection
    prefix: str
    partition: int
    lp: int
    names: tuple[str, ...]
    ordered: bool = True
    epoch: int = 1
    absent: bool = False
    appended: int = 0
    handled: set[int] = field(default_factory=set)
    said: set[int] = field(default_factory=set)
    seqs: dict[int, int] = field(default_factory=dict)

    def call(self, command: Any) -> Any:
        """Return a reply, and note where the node says that it does not have the partition."""
        (reply,) = self.connection.call([command])
        self.absent = self.absent or (isinstance(reply, list) and reply[:1] == [b"absent"])
        return reply

    def learn(self) -> None:
        """Look which message is at which offset: what is removed keeps its offsets until the node is armed."""
        (entries,) = self.connection.call([("XRANGE", partition_keys(self.prefix, self.partition).log, "-", "+")])
        self.seqs |= {int(entry_id[:-2]): int(fields[1].split(b":")[2]) for entry_id, fields in entries}

    def append(self, upto: int) -> None:
        """Send what is missing up to a seq, as a relay: from behind the mark that the partition tells."""
        if not self.send(self.appended + 1, upto):
            marks = partition_keys(self.prefix, self.partition).marks
            (mark,) = self.connection.call([("HGET", marks, f"{SOURCE}:{self.lp}")])
            self.send(int(mark or 0) + 1, upto)

    def send(self, first: int, upto: int) -> bool:
        """Append seqs from one to another, if any; say whether they are there."""
        if first > upto:
            return True
        fields = [part for n in range(first, upto + 1) for part in (b"1", b"k%d" % (n % KEYS), b"%d" % n)]
        run = MessageRun(self.lp, first, upto + 1 - first, fields)
        answer = append_reply(
            self.call(append_command(self.connection, self.prefix, self.partition, SOURCE, [run])), ""
        )
        if isinstance(answer, AppendReply) and (answer.outcomes is None or answer.outcomes[0].status in ("ok", "dup")):
            self.appended = upto
        return self.appended == upto

    def handle(self, seq: int) -> None:
        before = set(range(seq - KEYS, 0, -KEYS)) if self.ordered else set()
        assert before <= self.handled, f"{seq} before {sorted(before - self.handled)}"
        self.handled.add(seq)

    @property
    def committed(self) -> int:
        """The group's place; all below it was said to be settled."""
        (text,) = self.connection.call([("HGET", group_keys(self.prefix, self.partition, GROUP).lock, "committed")])
        below = {self.seqs[offset] for offset in range(1, int(text or 1)) if offset in self.seqs}
        assert below <= self.said, f"{sorted(below - self.said)} were never settled"
        return int(text or 1)

    @property
    def done(self) -> bool:
        (following,) = self.connection.call([("HGET", partition_keys(self.prefix, self.partition).meta, "next")])
        return self.committed == int(following or 0) and self.handled == set(range(1, LAST + 1))

    def remove(self) -> None:
        """Remove the keys."""
        partition, group = partition_keys(self.prefix, self.partition), group_keys(self.prefix, self.partition, GROUP)
        pop = pop_keys(self.prefix, self.partition, GROUP)
        named = {**partition._asdict(), **group._asdict(), **pop._asdict()}
        named["outcomes"] = outcomes_key(self.prefix, self.partition, GROUP)
        named["rate"] = rate_key(self.prefix, self.partition, GROUP)
        self.learn()
        for name in self.names:
            if name == NATIVE:
                self.connection.call([("XGROUP", "DESTROY", partition.log, "g1")])
            else:
                self.connection.call([("DEL", named[name])])


def member(lost: Lost, most: int) -> Callable[[], None]:
    """A member takes the partition and handles some messages of each key; return how it goes on later, as it was."""
    lost.epoch += 2
    holder = LockHolder(lost.prefix, lost.partition, GROUP, f"m{lost.epoch}", lost.epoch)
    taken = acquire_reply(lost.call(acquire_command(lost.connection, holder, start=1, afresh=True)), "")
    if not isinstance(taken, LockTaken):
        return lambda: None
    todo = [offset for offset in range(1, taken.next_offset) if not taken.has_settled(offset)]
    settled = {lost.seqs[offset] for offset in lost.seqs if offset < taken.next_offset and taken.has_settled(offset)}
    assert settled <= lost.said, f"{sorted(settled - lost.said)} were never settled"
    todo.sort(key=lambda offset: (-(lost.seqs[offset] % KEYS), offset))

    def go_on(some: list[int]) -> None:
        for offset in some:
            lost.call(attempt_command(lost.connection, holder, offset, 1))
            lost.handle(lost.seqs[offset])
            lost.said.add(lost.seqs[offset])
            told = encode_outcome("h", [(offset, 1)])
            lost.call(settle_command(lost.connection, holder, [(offset, offset)], [offset], told))
            assert lost.committed

    go_on(todo[:most])
    return lambda: go_on(todo[most : most + 2])


def receiver(lost: Lost, most: int) -> Callable[[], None]:
    """A receiver is given a batch, and acknowledges some of it, the last first; the rest later."""
    place = PopGroupPartition(lost.prefix, lost.partition, GROUP, "key", lost.epoch)
    answer = receive_reply(
        lost.call(
            receive_command(lost.connection, place, ReceiveRequest(f"a{len(lost.handled)}-{most}", most + 2, 10**6, 1))
        ),
        "",
    )
    if not isinstance(answer, PopBatch):
        return lambda: None
    for record in answer.records:
        lost.handle(lost.seqs[record.offset])

    def go_on(records: Any) -> None:
        for record in records:
            lost.said.add(lost.seqs[record.offset])
            token = [(answer.batch, record.offset)]
            lost.call(pop_settle_command(lost.connection, place, "ack", token, encoded_outcome=encode_pop_outcome("r")))
            assert lost.committed

    records = answer.records[::-1]
    go_on(records[:most])
    return lambda: go_on(records[most:])


def sharer(lost: Lost, most: int) -> Callable[[], None]:
    """A member of a shared group settles some of what it reads, gives some back, and has the rest."""
    place, connection = SharedGroupPartition(lost.prefix, lost.partition, GROUP, lost.epoch), lost.connection
    taken = shared_acquire_reply(lost.call(shared_acquire_command(connection, place, afresh=True)), "")
    if not isinstance(taken, EpochInForce):
        return lambda: None
    (found,) = connection.call([shared_read_command([place], "a", group_id=GROUP, count=most + 4, block_ms=0)])
    offsets = [int(entry_id[:-2]) for entry_id, _ in found[0][1]] if found and not isinstance(found, Exception) else []
    lost.call(shared_reclaim_command(connection, place, 0)) if not offsets else None
    again = shared_due_reply(lost.call(shared_due_command(connection, place, "a", 5)), "")
    offsets += [record.offset for record in again.records] if isinstance(again, DueMessages) else []

    def go_on(some: list[int]) -> None:
        for offset in some:
            lost.handle(lost.seqs[offset])
            lost.said.add(lost.seqs[offset])
        if some:
            ranges = as_ranges(sorted(some))
            told = encode_outcome("h" * len(ranges), [(some[-1], 1)])
            lost.call(shared_settle_command(connection, place, "a", ranges, encoded_outcome=told))
            assert lost.committed

    begin = int(len(offsets) > 1)
    settled, back, rest = offsets[begin : most + begin], offsets[:begin], offsets[most + begin :]
    go_on(settled)
    lost.call(shared_nack_command(connection, place, "a", [(offset, 0, 1) for offset in back])) if back else None
    return lambda: go_on(rest)


Way = Callable[[Lost, int], Callable[[], None]]

WAYS: Final[dict[Way, tuple[str, ...]]] = {
    member: (*PARTITION, "lock", "acks", "attempts", "outcomes", "rate"),
    receiver: (
        *PARTITION, "lock", "acks", "attempts", "outcomes", "rate", "pops", "queues", "due", "batches", "wake",
    ),
    sharer: (*PARTITION, "lock", "attempts", "outcomes", "rate", "due", NATIVE),
}  # fmt: skip


@pytest.fixture
def connection(every_redis: RedisServer) -> Iterator[NodeConnection]:
    """A connection to a Redis of each version."""
    with NodeConnection(Node(NodeId(1), "n1", every_redis.url, None), any_run=True) as connection:
        yield connection


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
            Lost(connection, key_prefix, at.partition, at.lp_from, lost, ordered=way is not sharer)
            for at, lost in zip(route.ranges, names, strict=True)
        ]
        for case in cases:
            consume_half(case, way)
        told = {finding.subject for finding in verify(runtime_of(database, key_prefix, application=database), "orders")
                if finding.verdict is CheckStatus.BROKEN and "node rearm" in finding.fix}  # fmt: skip
        for case in cases:
            go_on_alone(case, way)
        unnamed = [case.names for case in cases if case.absent and f"partition {case.partition}" not in told]
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
