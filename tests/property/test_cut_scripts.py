"""Any script may end at any of its write calls: what is left says nothing wrong, and the next calls repair it.

A server does so where its user lacks the right to one command, or where a key has another type. The sites are taken
from the scripts' own text: a new call is tried too, or fails `test_every_write_call_of_every_script_is_cut`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pytest

from mqlayer.domain.offsets import as_ranges
from mqlayer.domain.routing import NodeId
from mqlayer.redis.keys import ended_sources_key, group_keys, outcomes_key, partition_keys, pop_keys, terms_key
from mqlayer.redis.node_connection import Command, Node, NodeConnection
from mqlayer.redis.outcomes import encode_outcome, encode_pop_outcome, entries_of
from mqlayer.redis.partition_scripts import (
    AppendReply,
    Fenced,
    GroupStart,
    LockHolder,
    LockKept,
    LockTaken,
    MessageRun,
    acquire_command,
    acquire_reply,
    append_command,
    append_reply,
    attempt_command,
    create_command,
    dedup_load_command,
    drop_marks_command,
    fence_command,
    load_commands,
    open_command,
    recount_command,
    release_command,
    reopen_command,
    retire_command,
    seal_command,
    settle_command,
    settle_reply,
    skip_marks_command,
    start_command,
    trim_command,
)
from mqlayer.redis.pop_scripts import (
    NoBatch,
    PopBatch,
    PopGroupPartition,
    ReceiveRequest,
    pop_settle_command,
    pop_settle_reply,
    receive_command,
    receive_reply,
)
from mqlayer.redis.rate_script import rate_command
from mqlayer.redis.retirement_script import group_forget_command
from mqlayer.redis.shared_scripts import (
    DueMessages,
    SharedDrained,
    SharedGroupPartition,
    SharedSettled,
    shared_acquire_command,
    shared_acquire_reply,
    shared_attempt_command,
    shared_due_command,
    shared_due_reply,
    shared_extend_command,
    shared_nack_command,
    shared_read_command,
    shared_reclaim_command,
    shared_settle_command,
    shared_settle_reply,
)
from mqlayer.stack import RedisServer
from tests.fixtures.cut_scripts import Cut, CuttingConnection, World, sites_of

GROUP: Final = 7
SOURCE: Final = 3
KEYS: Final = 3
TRIES: Final = 60
_worlds = itertools.count(1)


def run(lp: int, first: int, count: int) -> MessageRun:
    fields = [part for n in range(count) for part in (b"1", b"k%d" % ((first + n) % KEYS), b"%d/%d" % (lp, first + n))]
    return MessageRun(lp, first, count, fields)


def make(world: World, partition: int = 1, state: str = "open", change: str = "") -> None:
    world.connection.call([create_command(world.connection, world.prefix, partition, "t", 0, 1024, state, change)])


def fill(world: World, count: int) -> None:
    make(world)
    world.connection.call([append_command(world.connection, world.prefix, 1, SOURCE, [run(5, 1, count)])])


class Book:
    """What the consumers of a partition handled, in order, and what they said is settled: offset n is seq n."""

    def __init__(self, world: World, count: int) -> None:
        self.world, self.count = world, count
        self.handled: set[int] = set()
        self.said: set[int] = set()
        self.in_order = True
        self.lock = group_keys(world.prefix, 1, GROUP).lock

    def handle(self, offset: int) -> None:
        before = set(range(offset - KEYS, 0, -KEYS)) if self.in_order else set()
        assert before <= self.handled, f"{offset} before {sorted(before - self.handled)}"
        self.handled.add(offset)

    @property
    def committed(self) -> int:
        """Where the group is; nothing below was never said to be settled."""
        (text,) = self.world.connection.call([("HGET", self.lock, "committed")])
        committed = int(text or 1)
        assert set(range(1, committed)) <= self.said
        return committed

    @property
    def done(self) -> bool:
        return self.committed > self.count

    def check(self) -> None:
        """All was handled and settled, each is told, and nothing is left that nobody looks at again."""
        assert self.done
        assert self.handled == set(range(1, self.count + 1))
        group, pop = group_keys(self.world.prefix, 1, GROUP), pop_keys(self.world.prefix, 1, GROUP)
        outcomes, *left = self.world.connection.call(
            [
                ("XRANGE", outcomes_key(self.world.prefix, 1, GROUP), "-", "+"),
                *(("EXISTS", key) for key in (group.attempts, pop.queues, pop.due)),
            ]
        )
        stretches = [one for entry in entries_of(outcomes) for one in entry.ranges]
        told = {offset for one in stretches for offset in range(one.first, one.last + 1)}
        dropped = sum(entry.dropped for entry in entries_of(outcomes))
        assert told == self.handled or dropped
        assert left == [0, 0, 0]


def leave_tail(world: World, partition: int, offset: int, lp: int, seq: int) -> None:
    """Leave a record as an append does that ended before it told of it."""
    record = ("m", f"{SOURCE}:{lp}:{seq}:1", "k", b"k%d" % (seq % KEYS), "b", b"%d/%d" % (lp, seq))
    world.connection.call([("XADD", partition_keys(world.prefix, partition).log, f"{offset}-0", *record)])


def once_command(world: World, *messages: tuple[int, int, bytes]) -> Command:
    """Return the command for messages (lp, seq, id), of ids that are dropped soon."""
    keys = partition_keys(world.prefix, 1)
    flat = [part for lp, seq, token in messages for part in (lp, seq, token, b"1", b"k", b"%d/%d" % (lp, seq))]
    return world.connection.script("log_append_once", keys, SOURCE, 0, 60_000, 3, len(messages), *flat)


def sending(world: World) -> None:
    """Two LPs and messages with ids; each message that was sent is there once, in the order of its chain."""
    connection, prefix = world.connection, world.prefix
    world.ask(lambda: create_command(connection, prefix, 1, "t", 0, 1024, "open", ""))
    make(world)
    ids = itertools.count(1)
    sent = {5: 0, 6: 0, 7: 0, 8: 0}

    def append(count: int) -> None:
        """As a relay: from behind the mark, until all is there."""
        goal = {lp: sent[lp] + count for lp in (5, 6)}
        while any(sent[lp] < goal[lp] for lp in goal):
            runs = [run(lp, sent[lp] + 1, goal[lp] - sent[lp]) for lp in goal]
            reply = world.ask(lambda: append_command(connection, prefix, 1, SOURCE, runs))  # noqa: B023
            answer = append_reply(reply, "") if reply is not None else None
            if isinstance(answer, AppendReply):
                sent.update(goal)

    def once(count: int) -> None:
        messages = [(lp, sent[lp] + 1, b"id%d" % next(ids)) for lp in (7, 8)[:count]]
        while world.ask(lambda: once_command(world, *messages)) is None:
            pass
        sent.update({lp: seq for lp, seq, _ in messages})
        # The same ids by others, after whatever happened.
        again = [(lp, sent[lp] + 1, token) for lp, _, token in messages]
        reply = world.ask(lambda: once_command(world, *again)) or world.ask(lambda: once_command(world, *again))
        assert set(reply[1::2]) == {b"same"}, reply

    def tail(lp: int) -> None:
        (meta,) = connection.call([("HGET", partition_keys(prefix, 1).meta, "next")])
        leave_tail(world, 1, int(meta), lp, sent[lp] + 1)
        sent[lp] += 1

    append(3)
    append(1)
    once(2)
    once(2)
    tail(5)
    append(2)
    tail(7)
    once(1)
    append(1)
    tail(6)
    # A sender that asks again for what it does not know of.
    sent[6] -= 1
    append(1)
    append(2)
    tail(5)
    sealed: Any = None
    for number in range(2 if world.again else 3):
        sealed = world.ask(lambda: seal_command(connection, prefix, 1, 12, f"seal-{number}"))  # noqa: B023
    assert sealed[0] == b"sealed"
    check_log(world, 1, sent, sealed[1])
    while world.ask(lambda: reopen_command(connection, prefix, 1, sealed[1].decode(), f"{SOURCE}:5", sent[5])) is None:
        seal_again(world, sealed[1])
    append(2)
    world.ask(lambda: seal_command(connection, prefix, 1, 12, "last")) or connection.call(
        [seal_command(connection, prefix, 1, 12, "other")]
    )
    check_log(world, 1, sent, None)


def seal_again(world: World, seal: bytes) -> None:
    """Whoever drives the change asks again: the command may be gone by now, and its entry id used up."""
    command = seal_command(world.connection, world.prefix, 1, 12, seal.decode())
    last = ("XREVRANGE", partition_keys(world.prefix, 1).log, "+", "-", "COUNT", 1)
    reply, records = world.connection.call([command, last])
    assert reply[:2] == [b"sealed", seal]
    assert records[0][1][5] == seal


def check_log(world: World, partition: int, sent: Mapping[int, int], seal: bytes | None) -> None:
    keys = partition_keys(world.prefix, partition)
    entries, marks, meta = world.connection.call(
        [("XRANGE", keys.log, "-", "+"), ("HGETALL", keys.marks), ("HGETALL", keys.meta)]
    )
    facts = dict(zip(meta[::2], meta[1::2], strict=True))
    chains: dict[int, list[int]] = {lp: [] for lp in sent}
    assert [entry_id for entry_id, _ in entries[:-1]] == [b"%d-0" % n for n in range(1, len(entries))]
    assert entries[-1][0] == b"%d-1" % (len(entries) - 1)
    assert entries[-1][1][5] == facts[b"seal"] == (seal or facts[b"seal"])
    for _, fields in entries[:-1]:
        _, lp, seq, _ = map(int, fields[1].split(b":"))
        assert fields[5] == b"%d/%d" % (lp, seq)
        chains[lp].append(seq)
    assert chains == {lp: list(range(1, seq + 1)) for lp, seq in sent.items()}
    known = dict(zip(marks[::2], map(int, marks[1::2]), strict=True))
    assert known == {b"%d:%d" % (SOURCE, lp): seq for lp, seq in sent.items()}
    assert (facts[b"state"], int(facts[b"next"])) == (b"sealed", len(entries))


def steps(world: World) -> None:
    """What is done once and said again until it is done: the same is there at the end as without a cut."""
    connection, prefix = world.connection, world.prefix
    for partition, state, change in ((1, "open", ""), (2, "importing", "12"), (3, "open", ""), (4, "open", "")):
        make(world, partition, state, change)
    keys, of_second = partition_keys(prefix, 1), partition_keys(prefix, 2)
    held = {f"{SOURCE}:{lp}": lp for lp in (1, 2, 3)}
    ids = [(b"a", b"1:3:1:1:1", 5), (b"b", b"1:3:2:2:1", 5)]
    floor = GroupStart(GROUP, 0, 200)
    connection.call([append_command(connection, prefix, 1, SOURCE, [run(5, 1, 300)])])
    connection.call([append_command(connection, prefix, 3, SOURCE, [run(5, 1, 4)])])
    connection.call(
        [
            append_command(connection, prefix, 4, SOURCE, [run(5, 1, 4)]),
            seal_command(connection, prefix, 4, 12, "the seal"),
        ]
    )
    fourth = partition_keys(prefix, 4)
    connection.call(
        [("DEL", fourth.meta, fourth.marks), create_command(connection, prefix, 4, "t", 0, 1024, "importing", "")]
    )
    group = group_keys(prefix, 3, GROUP)
    connection.call(
        [("HSET", group.lock, "owner", "a", "epoch", 4, "shared", "g7", "committed", 2), ("SET", group.acks, "x")]
    )
    connection.call([("XGROUP", "CREATE", partition_keys(prefix, 3).log, "g7", "0")])
    said: list[Callable[[], Command]] = [
        lambda: dedup_load_command(connection, prefix, 2, 12, 60_000, ids),
        *(
            lambda command=command: command()
            for command in (lambda: load_commands(connection, prefix, 2, 12, held)[0],)
        ),
        lambda: open_command(connection, prefix, 2, 12),
        lambda: open_command(connection, prefix, 2, 12),
        lambda: skip_marks_command(connection, prefix, 2, SOURCE, 1, 1, 5),
        lambda: skip_marks_command(connection, prefix, 2, SOURCE, 1, 5, 9),
        lambda: drop_marks_command(connection, prefix, 2, [b"3:2"]),
        lambda: drop_marks_command(connection, prefix, 2, [b"3:1", b"3:3"]),
        lambda: trim_command(connection, prefix, 1, [floor], floor=200, limit=1000),
        lambda: connection.script("source_end", (ended_sources_key(prefix),), SOURCE, f"{SOURCE}:closed"),
        lambda: connection.script("source_term", (terms_key(prefix),), SOURCE, "a term", "a nonce"),
        lambda: rate_command(connection, prefix, 1, GROUP, (1.0, 10.0, 5.0), wanted=2),  # type: ignore[arg-type]
        lambda: fence_command(connection, prefix, 1, GROUP, 9),
        lambda: group_forget_command(connection, prefix, 3, GROUP, 9, for_good=False, archived=False),
        lambda: group_forget_command(connection, prefix, 3, GROUP, 9, for_good=True, archived=False),
        lambda: retire_command(connection, prefix, 3, [GROUP]),
        lambda: restore(world, keys.meta),
        *(lambda: recount_command(connection, prefix, 1, start=101, marks={"9:9": 4}) for _ in range(3)),
        lambda: recount_command(connection, prefix, 4, start=1),
    ]
    for make_command in said:
        for _ in range(1 if world.again else 2):
            world.ask(make_command)
    found = {
        key: dump(connection, key)
        for key in (keys.meta, keys.marks, *of_second, partition_keys(prefix, 3).meta, fourth.meta)
    }
    assert found == {
        keys.meta: {b"state": b"open", b"next": b"301", b"first": b"101", b"topic": b"t", b"lp_from": b"0",
                    b"lp_to": b"1024", b"change": b""},
        keys.marks: {b"3:5": b"300", b"9:9": b"4"},
        of_second.meta: {b"state": b"open", b"next": b"1", b"first": b"1", b"topic": b"t", b"lp_from": b"0",
                         b"lp_to": b"1024", b"change": b"12", b"lost": b"8", b"lost_marks": b"3:1:5:9"},
        of_second.marks: {b"0:0": b"0"}, of_second.log: None,
        of_second.ids: {b"a": b"1:3:1:1:1", b"b": b"1:3:2:2:1"}, of_second.ages: [b"a", b"b"],
        partition_keys(prefix, 3).meta: {b"state": b"deleted"},
        fourth.meta: {b"state": b"sealed", b"next": b"5", b"first": b"1", b"topic": b"t", b"lp_from": b"0",
                      b"lp_to": b"1024", b"change": b"", b"sealed_for": b"12", b"seal": b"the seal"},
    }  # fmt: skip
    stem = f"{prefix}:{{3}}:*"
    assert connection.call([("KEYS", stem)]) == [[partition_keys(prefix, 3).meta]]


def trimmed(world: World) -> None:
    """A pass of trimming, then groups that begin with the first record: none waits for one that is gone."""
    connection, prefix, count = world.connection, world.prefix, 300
    fill(world, count)
    connection.call([seal_command(connection, prefix, 1, 12, "the seal")])
    keys = partition_keys(prefix, 1)
    for settled in (210, 250):
        # The first settles more than the second pass may drop, in whole nodes of the stream.
        world.ask(
            lambda: trim_command(connection, prefix, 1, [GroupStart(GROUP, 0, settled)], floor=settled, limit=1000)  # noqa: B023
        )
        ((head, _),) = connection.call([("XRANGE", keys.log, "-", "+", "COUNT", 1)])[0]
        (first,) = connection.call([("HGET", keys.meta, "first")])
        assert int(head[:-2]) <= int(first) <= settled
    holder = LockHolder(prefix, 1, GROUP + 1, "a", 1)
    taken = acquire_reply(connection.call([acquire_command(connection, holder, start=1)])[0], "")
    assert isinstance(taken, LockTaken)
    read = [int(one[0][:-2]) for one in connection.call([("XRANGE", keys.log, b"%d-0" % taken.committed, "+")])[0][:-1]]
    connection.call([settle_command(connection, holder, as_ranges(read))])
    shared, popped = SharedGroupPartition(prefix, 1, GROUP + 2, 1), PopGroupPartition(prefix, 1, GROUP + 3, "key", 1)
    connection.call([shared_acquire_command(connection, shared)])
    connection.call([shared_read_command([shared], "a", group_id=GROUP + 2, count=500, block_ms=0)])
    connection.call([shared_settle_command(connection, shared, "a", [(1, count)])])
    answer = receive_reply(
        connection.call([receive_command(connection, popped, ReceiveRequest("a", 500, 10**6, 1))])[0], ""
    )
    assert isinstance(answer, PopBatch)
    connection.call(
        [pop_settle_command(connection, popped, "ack", [(answer.batch, record.offset) for record in answer.records])]
    )
    locks = [group_keys(prefix, 1, GROUP + n).lock for n in (1, 2, 3)]
    assert connection.call([("HGET", lock, "committed") for lock in locks]) == [b"%d" % (count + 1)] * 3
    connection.call([trim_command(connection, prefix, 1, [GroupStart(GROUP, 0, 250)], floor=250, limit=1000)])
    head, first = connection.call([("XRANGE", keys.log, "-", "+", "COUNT", 1), ("HGET", keys.meta, "first")])
    assert head[0][0] == b"%s-0" % first


def restore(world: World, meta: bytes) -> Command:
    """Remove what tells of a partition's records, and make it anew as arming does."""
    world.connection.call([("DEL", meta), ("DEL", partition_keys(world.prefix, 1).marks)])
    return create_command(world.connection, world.prefix, 1, "t", 0, 1024, "open", "")


def dump(connection: NodeConnection, key: bytes) -> Any:
    (kind,) = connection.call([("TYPE", key)])
    if kind == b"none":
        return None
    if kind == b"zset":
        return connection.call([("ZRANGE", key, 0, -1)])[0]
    flat = connection.call([("HGETALL", key)])[0]
    return dict(zip(flat[::2], flat[1::2], strict=True))


def members(world: World) -> None:
    """Members of an ordered group, one after the other, which settle out of order, fail and die."""
    connection, prefix, count = world.connection, world.prefix, 26
    fill(world, count)
    book, group = Book(world, count), group_keys(prefix, 1, GROUP)
    epoch = 1
    for turn in range(TRIES):
        if book.done:
            break
        holder = LockHolder(prefix, 1, GROUP, f"m{turn}", epoch)
        reply = world.ask(lambda: acquire_command(connection, holder, start=1, afresh=True))  # noqa: B023
        epoch += 2
        taken = acquire_reply(reply, "") if reply is not None else None
        if not isinstance(taken, LockTaken):
            continue
        assert all(o in book.said for o in range(1, count + 1) if taken.has_settled(o))
        todo = [o for o in range(1, count + 1) if not taken.has_settled(o)]
        one_member(world, book, holder, sorted(todo, key=lambda o: (-(o % KEYS), o)), most=5 if turn < 6 else count)
        if turn == 1:
            connection.call([("DEL", group.acks)])
        if turn == 2:
            # As a call leaves them that ended between what it writes.
            connection.call(
                [("HSET", group.lock, "top", 0), ("SET", group.acks, "x"), ("HSET", group.attempts, 1, "1:1:1")]
            )
        if turn == 5:
            world.ask(lambda: fence_command(connection, prefix, 1, GROUP, epoch))  # noqa: B023
    connection.call([acquire_command(connection, LockHolder(prefix, 1, GROUP, "last", epoch + 1), start=1)])
    book.check()


def one_member(world: World, book: Book, holder: LockHolder, todo: list[int], *, most: int) -> None:
    """Handle some messages, two with each call, and go: by releasing, or dead."""
    connection = world.connection
    for at in range(0, min(most, len(todo)), 2):
        some = todo[at : at + 2]
        for offset in some:
            world.ask(lambda: start_command(connection, holder, offset, alone=True))  # noqa: B023
            world.ask(lambda: attempt_command(connection, holder, offset, 1))  # noqa: B023
            book.handle(offset)
        ranges = as_ranges(sorted(some))
        told = encode_outcome("h" * len(ranges), [(some[-1], 1)], max_entries=3 if most > 5 else 100)
        book.said |= set(some)
        reply = world.ask(lambda: settle_command(connection, holder, ranges, some, told))  # noqa: B023
        if reply is None or not isinstance(settle_reply(reply, ""), LockKept):
            return
        assert book.committed
        if at == 2:
            # As of a lock that was removed, and taken long ago.
            connection.call([("HDEL", book.lock, "outcome_count"), ("HSET", book.lock, "refreshed_at", 1)])
        world.ask(lambda: acquire_command(connection, holder, start=1))
        if at == 2 and holder.epoch == 5:
            connection.call([("DEL", group_keys(holder.prefix, 1, GROUP).acks)])
    if holder.epoch % 4 == 1:
        world.ask(lambda: release_command(connection, holder))


def sought(world: World) -> None:
    """A group that is sent elsewhere starts there, whatever was settled before."""
    connection, prefix = world.connection, world.prefix
    fill(world, 9)
    holder = LockHolder(prefix, 1, GROUP, "a", 5)
    connection.call([acquire_command(connection, holder, start=1), settle_command(connection, holder, [(2, 4)])])
    reply = None
    for seek, start in ((1, 3), (2, 2)):
        holder = LockHolder(prefix, 1, GROUP, "a", 5 + seek)
        for _ in range(3):
            reply = world.ask(lambda: acquire_command(connection, holder, start=start, seek=seek, afresh=True)) or reply  # noqa: B023
        taken = acquire_reply(reply, "")
        assert isinstance(taken, LockTaken)
        assert (taken.committed, taken.bits) == (start, b"")
        connection.call([settle_command(connection, holder, [(start + 2, start + 4)])])


def shared_seek(world: World) -> None:
    """A shared group that is sent elsewhere starts there."""
    connection, prefix = world.connection, world.prefix
    fill(world, 9)
    place = SharedGroupPartition(prefix, 1, GROUP, 1)
    for epoch, seek, start in ((1, 0, 1), (2, 1, 5)):
        place = SharedGroupPartition(prefix, 1, GROUP, epoch, start, seek)
        for _ in range(3):
            world.ask(lambda: shared_acquire_command(connection, place, afresh=True))  # noqa: B023
        (found,) = connection.call([shared_read_command([place], "a", group_id=GROUP, count=3, block_ms=0)])
        assert found[0][1][0][0] == b"%d-0" % start
        connection.call([shared_settle_command(connection, place, "a", [(start, start)])])
        connection.call([shared_nack_command(connection, place, "a", [(start + 1, 0, 1)])])
    connection.call([seal_command(connection, prefix, 1, 12, "the seal")])
    connection.call([shared_read_command([place], "a", group_id=GROUP, count=9, block_ms=0)])
    for _ in range(2):
        world.ask(lambda: shared_settle_command(connection, place, "a", [(1, 9)], command=b"9-1"))
    assert isinstance(
        shared_acquire_reply(connection.call([shared_acquire_command(connection, place)])[0], ""), SharedDrained
    )


def wide(world: World) -> None:
    """So much is settled behind a blocked head that what is spent of the bitmap is cut off."""
    connection, prefix, last = world.connection, world.prefix, 90
    make(world)
    keys = partition_keys(prefix, 1)
    connection.call(
        [("XADD", keys.log, f"{last}-0", "m", "3:5:1:1", "k", "k", "b", "b"), ("HSET", keys.meta, "next", last + 1)]
    )
    said: set[int] = set()
    for epoch in range(1, TRIES):
        holder = LockHolder(prefix, 1, GROUP, "a", epoch)
        reply = world.ask(lambda: acquire_command(connection, holder, start=1, afresh=True))  # noqa: B023
        taken = acquire_reply(reply, "") if reply is not None else None
        if not isinstance(taken, LockTaken):
            continue
        settled = {o for o in range(1, last + 1) if taken.has_settled(o)}
        assert settled <= said
        if len(settled) == last:
            return
        for ranges in ([(2, 30), (32, 60)], [(1, 1)], [(63, 75)], [(31, 31), (61, last)]):
            said |= {o for first, end in ranges for o in range(first, end + 1)}
            reply = world.ask(lambda: settle_command(connection, holder, ranges))  # noqa: B023
            if reply is None or isinstance(settle_reply(reply, ""), Fenced):
                break
    raise AssertionError("it never comes to the end")


def receivers(world: World) -> None:
    """Receivers of an ordered group that acknowledge, give back, extend, and ask again."""
    connection, prefix, count = world.connection, world.prefix, 14
    fill(world, count)
    book, pop, group = Book(world, count), pop_keys(prefix, 1, GROUP), group_keys(prefix, 1, GROUP)
    place = PopGroupPartition(prefix, 1, GROUP, "key", 2)
    for turn in range(6 * TRIES):
        if book.done:
            break
        if turn == 4:
            connection.call([("HSET", group.lock, "wake_count", 0, "outcome_count", 0)])
        rate = (1e6, 1e6, 1e6) if turn % 2 else None
        place = PopGroupPartition(prefix, 1, GROUP, "key", 1 if turn < 8 else 2, rate=rate)  # type: ignore[arg-type]
        wish = ReceiveRequest(f"a{turn}", 5 if turn % 3 == 1 else 3, 10**6, 1)
        reply = world.ask(lambda: receive_command(connection, place, wish))  # noqa: B023
        answer = receive_reply(reply, "") if reply is not None else None
        assert answer is None or isinstance(answer, PopBatch | NoBatch)
        assert book.committed
        if isinstance(answer, PopBatch):
            world.ask(lambda: receive_command(connection, place, wish))  # noqa: B023
            if turn == 6:
                connection.call([("DEL", pop.queues)])
            one_receiver(world, book, place, answer, turn)
    assert book.done
    # What was settled and had not left its lane is given again; nor does a lane's time stay where nothing stands in it.
    connection.call([("ZADD", pop.due, 0, "k1")])
    world.ask(lambda: receive_command(connection, place, ReceiveRequest("late", 1, 10**6, 1)))
    for turn in range(6):
        reply = connection.call([receive_command(connection, place, ReceiveRequest(f"last-{turn}", 50, 10**6, 1))])[0]
        if isinstance(answer := receive_reply(reply, ""), PopBatch):
            tokens = [(answer.batch, record.offset) for record in answer.records]
            connection.call([pop_settle_command(connection, place, "ack", tokens)])
    book.check()


def one_receiver(world: World, book: Book, place: PopGroupPartition, given: PopBatch, turn: int) -> None:
    connection, offsets = world.connection, [record.offset for record in given.records]
    for offset in offsets:
        book.handle(offset)
    if turn % 3 == 1:
        for word in ("extend", "nack"):
            tokens = [(given.batch, offset) for offset in offsets]
            world.ask(lambda: pop_settle_command(connection, place, word, tokens, ms=0))  # noqa: B023
        return
    # The last one first, so that the bitmap is needed.
    tokens = [(given.batch, offset) for offset in reversed(offsets)]
    for some in (tokens[:1], tokens[1:]):
        if some:
            book.said |= {offset for _, offset in some}
            told = encode_pop_outcome("r", max_entries=3 if turn > 30 else 100)
            reply = world.ask(lambda: pop_settle_command(connection, place, "ack", some, encoded_outcome=told))  # noqa: B023
            assert reply is None or pop_settle_reply(reply, "")
            assert book.committed


def far_receivers(world: World) -> None:
    """One message is behind for long: what is spent of the bitmap is cut off; and a record that somebody removed."""
    connection, prefix, last = world.connection, world.prefix, 40
    fill(world, 3)
    place = PopGroupPartition(prefix, 1, GROUP, "key", 1)
    keys, group = partition_keys(prefix, 1), group_keys(prefix, 1, GROUP)
    connection.call([receive_command(connection, place, ReceiveRequest("a", 1, 10**6, 3_600_000))])
    # As if all but the head and what follows had been given and acknowledged.
    bits = b"\x7f" + b"\xff" * (last // 8 - 1)
    connection.call([
        ("HSET", keys.meta, "next", last + 4), ("SET", group.acks, bits),
        ("HSET", group.lock, "base", 1, "top", last + 1, "examined", last + 1),
        *(("XADD", keys.log, f"{last + n}-0", "m", f"3:5:{n}:1", "k", "k", "b", "b") for n in (1, 2, 3)),
    ])  # fmt: skip
    reply = world.ask(lambda: receive_command(connection, place, ReceiveRequest("b", 3, 10**6, 1)))
    for n in range(8, 0, -1):
        world.ask(lambda: pop_settle_command(connection, place, "ack", [(n, last + 2), (n, 1)]))  # noqa: B023
    connection.call([("XDEL", keys.log, f"{last + 1}-0")])
    for n in range(2, 9):
        reply = world.ask(lambda: receive_command(connection, place, ReceiveRequest(f"c{n}", 3, 10**6, 1)))  # noqa: B023
    assert reply is None or isinstance(receive_reply(reply, ""), PopBatch | NoBatch)
    (committed,) = connection.call([("HGET", group.lock, "committed")])
    assert int(committed) in (1, last + 1)


def many_batches(world: World) -> None:
    """More batches than are remembered; and a receiver whose group is sent elsewhere."""
    connection, prefix = world.connection, world.prefix
    fill(world, 60)
    place = PopGroupPartition(prefix, 1, GROUP, "key", 1)
    given: set[int] = set()
    connection.call([receive_command(connection, place, ReceiveRequest("a", 1, 10**6, 3_600_000))])
    connection.call([("HSET", group_keys(prefix, 1, GROUP).lock, "pop", 4)])
    place = PopGroupPartition(prefix, 1, GROUP, "key", 2, 4, 1)
    for n in range(1, TRIES):
        wish = ReceiveRequest(f"b{n}", 7, 10**6, 3_600_000)
        reply = world.ask(lambda: receive_command(connection, place, wish))  # noqa: B023
        answer = receive_reply(reply, "") if reply is not None else None
        if isinstance(answer, PopBatch):
            given |= {record.offset for record in answer.records}
            if n < 3:
                # Nothing is given of the lanes that are out: what is new stands in them.
                world.ask(lambda: receive_command(connection, place, ReceiveRequest(f"held-{n}", 7, 10**6, 3_600_000)))  # noqa: B023
            tokens = [(answer.batch, record.offset) for record in answer.records]
            connection.call([pop_settle_command(connection, place, "ack", tokens)])
        elif isinstance(answer, NoBatch) and answer.status == "empty" and answer.wait_ms < 0:
            break


def sharers(world: World) -> None:
    """Members of a shared group that settle, give back, keep, vanish, and are taken from."""
    connection, prefix, count = world.connection, world.prefix, 14
    fill(world, count)
    connection.call([seal_command(connection, prefix, 1, 12, "the seal")])
    book, due = Book(world, count), pop_keys(prefix, 1, GROUP).due
    book.in_order = False
    epoch, through = 1, False
    place = SharedGroupPartition(prefix, 1, GROUP, epoch)
    for turn in range(TRIES):
        if turn == 4:
            epoch = 3
            connection.call([fence_command(connection, prefix, 1, GROUP, epoch)])
        place, member = SharedGroupPartition(prefix, 1, GROUP, epoch), "abc"[turn % 3]
        replies = [world.ask(lambda: shared_acquire_command(connection, place, afresh=one)) for one in (True, False)]  # noqa: B023
        assert book.committed
        if None in replies:
            continue
        through = isinstance(shared_acquire_reply(replies[1], ""), SharedDrained)
        if through:
            break
        world.ask(lambda: shared_reclaim_command(connection, place, 0)) if turn % 3 == 2 else None  # noqa: B023
        one_sharer(world, book, place, member, turn)
        if turn == 1:
            connection.call([("DEL", due)])
        if turn == 8:
            connection.call([("HDEL", book.lock, "outcome_count")])
        if turn == 5:
            connection.call([("XGROUP", "DESTROY", partition_keys(prefix, 1).log, "g7")])
    assert through
    connection.call([("HSET", book.lock, "committed", 3)])
    for _ in range(2):
        world.ask(lambda: shared_acquire_command(connection, place))
    for _ in range(3):
        world.ask(lambda: shared_reclaim_command(connection, place, 0))
        world.ask(lambda: shared_due_command(connection, place, "a", 50))
        world.ask(lambda: shared_settle_command(connection, place, "a", [(1, count)]))
    book.check()


def one_sharer(world: World, book: Book, place: SharedGroupPartition, member: str, turn: int) -> None:
    connection = world.connection
    (found,) = connection.call([shared_read_command([place], member, group_id=GROUP, count=3, block_ms=0)])
    read = [] if not found or isinstance(found, Exception) else [entry_id for entry_id, _ in found[0][1]]
    offsets = [int(entry_id[:-2]) for entry_id in read if entry_id.endswith(b"-0")]
    reply = world.ask(lambda: shared_due_command(connection, place, member, 3))
    again = shared_due_reply(reply, "") if reply is not None else None
    if isinstance(again, DueMessages):
        offsets += [record.offset for record in again.records]
        offsets += again.missing if set(again.missing) <= book.said else []
    if turn % 4 == 1 and offsets:
        world.ask(
            lambda: shared_nack_command(connection, place, member, [(o, 0, 1 if o % 2 else None) for o in offsets])
        )
        if turn < 9:
            return
        # Handled all the same, and said so while it is back.
        offsets = offsets[:1]
    if turn % 4 == 2 and offsets:
        world.ask(lambda: shared_attempt_command(connection, place, member, offsets[0]))
        world.ask(lambda: shared_extend_command(connection, place, member, offsets))
        return
    for offset in offsets:
        book.handle(offset)
    if offsets:
        ranges = as_ranges(sorted(set(offsets)))
        book.said |= set(offsets)
        told = encode_outcome("h" * len(ranges), [(max(offsets), 1)], max_entries=3 if turn > 20 else 100)
        reply = world.ask(lambda: shared_settle_command(connection, place, member, ranges, encoded_outcome=told))
        assert reply is None or isinstance(shared_settle_reply(reply, ""), SharedSettled)
    # Whoever reads the command is gone: it is taken from it.


STORIES: Final = (
    sending, steps, trimmed, members, sought, wide, receivers, far_receivers, many_batches, sharers, shared_seek,
)  # fmt: skip


@pytest.fixture
def connection(every_redis: RedisServer) -> Iterator[CuttingConnection]:
    """A connection to a Redis of each version."""
    with NodeConnection(Node(NodeId(1), "n", every_redis.url, None), any_run=True) as plain:
        sites = sites_of(plain)
    cutting = CuttingConnection(every_redis.url, sites)
    yield cutting
    cutting.close()


def played(
    connection: CuttingConnection, key_prefix: str, story: Callable[[World], None], cut: Cut | None, *, again: bool
) -> bool:
    """Play a story under a prefix of its own; say whether its script was cut."""
    connection.calls.clear()
    connection.cut, connection.was_cut = cut, False
    story(World(connection, f"{key_prefix}-{next(_worlds)}", again))
    return connection.was_cut


def cuts_of(connection: CuttingConnection, key_prefix: str, story: Callable[[World], None]) -> list[Cut]:
    """Play a story as it is, and return where to end the scripts that it calls."""
    connection.notes = f"{key_prefix}-notes-{story.__name__}"
    played(connection, key_prefix, story, None, again=True)
    cuts, connection.notes = connection.cuts(connection.notes), None
    return cuts


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_script_that_ends_at_any_write_call_leaves_nothing_that_the_next_calls_do_not_repair(
    connection: CuttingConnection, key_prefix: str, story: Callable[[World], None]
) -> None:
    """Whoever was cut asks again; or is gone, and others go on."""
    failed = []
    for cut in cuts_of(connection, key_prefix, story):
        for again in (True, False):
            try:
                played(connection, key_prefix, story, cut, again=again)
            except Exception as error:  # noqa: BLE001
                failed.append(f"{cut} again={again}: {type(error).__name__} {error}")
    assert not failed, "\n".join(failed)


def test_every_write_call_of_every_script_is_cut(connection: CuttingConnection, key_prefix: str) -> None:
    """So whoever writes a script, or a call, adds to a story."""
    cut = {(one.site.script, one.site.number) for story in STORIES for one in cuts_of(connection, key_prefix, story)}
    assert "\n".join(str(site) for site in connection.sites if (site.script, site.number) not in cut) == ""
