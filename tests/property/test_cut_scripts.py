"""Any script may end at any of its write calls: what is left says nothing wrong, and the next calls repair it.

A server does so where its user lacks the right to one command, or where a key has another type. The sites are taken
from the scripts' own text: a new call is tried too, or fails `test_every_write_call_of_every_script_is_cut`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pytest

from mqlayer.domain.key_classes import key_class_rule
from mqlayer.domain.offsets import as_ranges
from mqlayer.domain.rates import RateShare
from mqlayer.domain.routing import NodeId
from mqlayer.redis.copy_script import group_copy_command
from mqlayer.redis.keys import ended_sources_key, partition_keys, terms_key
from mqlayer.redis.node_connection import Command, Node, NodeConnection
from mqlayer.redis.outcomes import encode_pop_outcome
from mqlayer.redis.partition_scripts import (
    AppendReply,
    Fenced,
    GroupStart,
    LockKept,
    LockTaken,
    Sealed,
    create_command,
    dedup_load_command,
    drop_marks_command,
    fence_command,
    load_commands,
    open_command,
    recount_command,
    reopen_command,
    retire_command,
    skip_marks_command,
    touch_command,
    trim_command,
)
from mqlayer.redis.pop_scripts import NoBatch, PopBatch, PopClasses
from mqlayer.redis.rate_script import rate_command
from mqlayer.redis.retention_scripts import LogBound
from mqlayer.redis.retirement_script import group_forget_command
from mqlayer.redis.shared_scripts import DeferredMessages, DueMessages, SharedDrained, SharedSettled
from mqlayer.stack import RedisServer
from tests.fixtures.cut_scripts import Cut, CuttingConnection, World, sites_of
from tests.fixtures.partition_harness import (
    CHANGE,
    GROUP,
    KEYS,
    SEAL,
    SOURCE,
    Book,
    MemberScripts,
    PartitionHarness,
    ReceiverScripts,
    SharerScripts,
    all_handled,
    keyed_run,
)
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until

TRIES: Final = 60
_worlds = itertools.count(1)


class WholeBook(Book):
    """Of a partition that is filled, and is to be handled to its end."""

    def __init__(self, world: World, count: int, *, in_order: bool = True) -> None:
        super().__init__(world.plain(), in_order)
        self.count = count
        self.partition.fill(count)

    @property
    def done(self) -> bool:
        return self.committed > self.count

    def check(self) -> None:
        """All was handled and settled, each is told, and nothing is left that nobody looks at again."""
        assert self.done
        assert self.handled == set(range(1, self.count + 1))
        entries = self.partition.told()
        told = {offset for entry in entries for one in entry.ranges for offset in range(one.first, one.last + 1)}
        assert told == self.handled or any(entry.dropped for entry in entries)
        assert self.left == 0

    @property
    def left(self) -> int:
        """How many keys are left that are gone when all is settled."""
        keys = (self.partition.group.attempts, self.partition.pops.queues, self.partition.pops.due)
        return int(self.partition.call(("EXISTS", *keys))[0])


def leave_tail(partition: PartitionHarness, lp: int, seq: int) -> None:
    """Leave a record as an append does that ended before it told of it."""
    record = ("m", f"{SOURCE}:{lp}:{seq}:1", "k", b"k%d" % (seq % KEYS), "b", b"%d/%d" % (lp, seq))
    partition.call(("XADD", partition.keys.log, f"{partition.next_offset}-0", *record))


def once_command(world: World, *messages: tuple[int, int, bytes]) -> Command:
    """Return the command for messages (lp, seq, id), of ids that are dropped soon."""
    keys = partition_keys(world.prefix, 1)
    flat = [part for lp, seq, token in messages for part in (lp, seq, token, b"1", b"k", b"%d/%d" % (lp, seq))]
    return world.connection.script("log_append_once", keys, SOURCE, 0, 60_000, 3, len(messages), *flat)


def sending(world: World) -> None:
    """Two LPs and messages with ids; each message that was sent is there once, in the order of its chain."""
    plain, cut = world.plain(), world.cut()
    cut.create()
    plain.create()
    ids = itertools.count(1)
    sent = {5: 0, 6: 0, 7: 0, 8: 0}

    def append(count: int) -> None:
        """As a relay: from behind the mark, until all is there."""
        goal = {lp: sent[lp] + count for lp in (5, 6)}
        while any(sent[lp] < goal[lp] for lp in goal):
            runs = [keyed_run(lp, sent[lp] + 1, goal[lp] - sent[lp]) for lp in goal]
            if isinstance(cut.append(*runs), AppendReply):
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
        leave_tail(plain, lp, sent[lp] + 1)
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
    sealed: object = None
    for number in range(2 if world.again else 3):
        sealed = cut.seal(seal_id=f"seal-{number}")
    assert isinstance(sealed, Sealed)
    check_log(plain, sent, sealed.seal_id)
    while world.ask(lambda: reopen_command(*cut.where, sealed.seal_id, f"{SOURCE}:5", sent[5])) is None:
        seal_again(plain, sealed.seal_id)
    append(2)
    cut.seal(seal_id="last") or plain.seal(seal_id="other")
    check_log(plain, sent, None)


def seal_again(partition: PartitionHarness, seal: str) -> None:
    """Whoever drives the change asks again: the command may be gone by now, and its entry id used up."""
    sealed = partition.seal(seal_id=seal)
    assert isinstance(sealed, Sealed)
    assert sealed.seal_id == seal
    assert partition.entries()[-1][1][5] == seal.encode()


def check_log(partition: PartitionHarness, sent: Mapping[int, int], seal: str | None) -> None:
    entries = partition.entries()
    facts, marks = (dump(partition.connection, key) for key in (partition.keys.meta, partition.keys.marks))
    chains: dict[int, list[int]] = {lp: [] for lp in sent}
    assert [entry_id for entry_id, _ in entries[:-1]] == [b"%d-0" % n for n in range(1, len(entries))]
    assert entries[-1][0] == b"%d-1" % (len(entries) - 1)
    assert entries[-1][1][5] == facts[b"seal"] == (seal.encode() if seal else facts[b"seal"])
    for _, fields in entries[:-1]:
        _, lp, seq, _ = map(int, fields[1].split(b":"))
        assert fields[5] == b"%d/%d" % (lp, seq)
        chains[lp].append(seq)
    assert chains == {lp: list(range(1, seq + 1)) for lp, seq in sent.items()}
    known = {name: int(mark) for name, mark in marks.items()}
    assert known == {b"%d:%d" % (SOURCE, lp): seq for lp, seq in sent.items()}
    assert (facts[b"state"], int(facts[b"next"])) == (b"sealed", len(entries))


def steps(world: World) -> None:
    """What is done once and said again until it is done: the same is there at the end as without a cut."""
    connection, prefix = world.connection, world.prefix
    first, second, third, fourth = (world.plain(number) for number in (1, 2, 3, 4))
    first.fill(300)
    second.create("importing", CHANGE)
    third.fill(4)
    fourth.fill(4)
    fourth.seal()
    fourth.call(("DEL", fourth.keys.meta, fourth.keys.marks))
    fourth.create("importing")
    third.call(
        ("HSET", third.group.lock, "owner", "a", "epoch", 4, "shared", "g7", "committed", 2),
        ("SET", third.group.acks, "x"),
        ("XGROUP", "CREATE", third.keys.log, "g7", "0"),
    )
    source, copied = (world.plain(group_id=GROUP + n).group for n in (3, 4))
    first.call(
        ("HSET", source.lock, "owner", "a", "epoch", 3, "committed", 205, "base", 205, "top", 207),
        ("SET", source.acks, b"\x40"),
        ("HSET", source.attempts, 210, "2:5:6:a"),
    )
    held = {f"{SOURCE}:{lp}": lp for lp in (1, 2, 3)}
    ids = [(b"a", b"1:3:1:1:1", 5), (b"b", b"1:3:2:2:1", 5)]
    floor = GroupStart(GROUP, 0, 200)
    said: list[Callable[[], Command]] = [
        lambda: dedup_load_command(*second.where, CHANGE, 60_000, ids),
        lambda: load_commands(*second.where, CHANGE, held)[0],
        lambda: open_command(*second.where, CHANGE),
        lambda: open_command(*second.where, CHANGE),
        lambda: skip_marks_command(*second.where, SOURCE, 1, 1, 5),
        lambda: skip_marks_command(*second.where, SOURCE, 1, 5, 9),
        lambda: drop_marks_command(*second.where, [b"3:2"]),
        lambda: drop_marks_command(*second.where, [b"3:1", b"3:3"]),
        lambda: trim_command(*first.where, [floor], floor=200, limit=1000),
        lambda: connection.script("source_end", (ended_sources_key(prefix),), SOURCE, f"{SOURCE}:closed"),
        lambda: connection.script("source_term", (terms_key(prefix),), SOURCE, "a term", "a nonce"),
        lambda: rate_command(*first.where, GROUP, RateShare(1.0, 10.0, 5.0), wanted=2),
        lambda: touch_command(*first.where),
        lambda: fence_command(*first.where, GROUP, 9),
        lambda: group_copy_command(*first.where, (GROUP + 3, GROUP + 4), 4, start=1, seek=0),
        lambda: group_forget_command(*third.where, GROUP, 9, for_good=False, archived=False),
        lambda: group_forget_command(*third.where, GROUP, 9, for_good=True, archived=False),
        lambda: retire_command(*third.where, [GROUP]),
        lambda: restore(first),
        *(lambda: recount_command(*first.where, start=101, marks={"9:9": 4}) for _ in range(3)),
        lambda: recount_command(*fourth.where, start=1),
    ]
    for make_command in said:
        for _ in range(1 if world.again else 2):
            world.ask(make_command)
    keys, of_second = first.keys, second.keys
    looked_at = (keys.meta, keys.marks, *of_second, third.keys.meta, fourth.keys.meta)
    made = {b"topic": b"t", b"lp_from": b"0", b"lp_to": b"1024"}
    assert {key: dump(connection, key) for key in looked_at} == {
        keys.meta: {**made, b"state": b"open", b"next": b"301", b"first": b"101", b"change": b""},
        keys.marks: {b"3:5": b"300", b"9:9": b"4"},
        of_second.meta: {**made, b"state": b"open", b"next": b"1", b"first": b"1", b"change": b"12", b"lost": b"8",
                         b"lost_marks": b"3:1:5:9"},
        of_second.marks: {b"0:0": b"0"}, of_second.log: None,
        of_second.ids: {b"a": b"1:3:1:1:1", b"b": b"1:3:2:2:1"}, of_second.ages: [b"a", b"b"],
        third.keys.meta: {b"state": b"deleted"},
        fourth.keys.meta: {**made, b"state": b"sealed", b"next": b"5", b"first": b"1", b"change": b"",
                           b"sealed_for": b"12", b"seal": SEAL.encode()},
    }  # fmt: skip
    taken = world.plain(group_id=GROUP + 4).member("b", 9).acquire()
    assert isinstance(taken, LockTaken)
    assert (taken.committed, taken.base, taken.bits, taken.guarded_below) == (205, 205, b"\x40", 0)
    assert first.call(("HGETALL", copied.attempts)) == [[b"210", b"2:5:6"]]
    assert third.call(("KEYS", f"{prefix}:{{3}}:*")) == [[third.keys.meta]]


def trimmed(world: World) -> None:
    """A pass of trimming, then groups that begin with the first record: none waits for one that is gone."""
    plain, cut, count = world.plain(), world.cut(), 300
    plain.fill(count)
    plain.seal()
    for settled in (210, 250):
        # The first settles more than the second pass may drop, in whole nodes of the stream.
        cut.trim(settled, start=settled)
        assert first_entry(plain) <= first_offset(plain) <= settled
    member = world.plain(group_id=GROUP + 1).member("a", 1)
    taken = member.acquire()
    assert isinstance(taken, LockTaken)
    member.settle(as_ranges([int(entry_id[:-2]) for entry_id, _ in plain.entries(taken.committed)[:-1]]))
    sharer = world.plain(group_id=GROUP + 2).sharer("a", 1)
    sharer.acquire()
    sharer.read(500)
    sharer.settle([(1, count)])
    receiver = world.plain(group_id=GROUP + 3).receiver("key", 1)
    answer = receiver.receive("a", 500, 1)
    assert isinstance(answer, PopBatch)
    receiver.settle("ack", tokens_of(answer))
    assert [one.partition.committed for one in (member, sharer, receiver)] == [count + 1] * 3
    plain.trim(250, start=250)
    assert first_entry(plain) == first_offset(plain)


def first_entry(partition: PartitionHarness) -> int:
    """Return the offset of the first record that is there."""
    return int(partition.entries()[0][0][:-2])


def first_offset(partition: PartitionHarness) -> int:
    """Return where the records begin, as the meta says."""
    return int(partition.call(("HGET", partition.keys.meta, "first"))[0])


def tokens_of(given: PopBatch) -> list[tuple[int, int]]:
    return [(given.batch, record.offset) for record in given.records]


def restore(partition: PartitionHarness) -> Command:
    """Remove what tells of a partition's records, and make it anew as arming does."""
    partition.call(("DEL", partition.keys.meta, partition.keys.marks))
    return create_command(*partition.where, "t", 0, 1024, "open", "")


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
    count = 26
    plain, cut, book = world.plain(), world.cut(), WholeBook(world, count)
    epoch = 1
    for turn in range(TRIES):
        if book.done:
            break
        member = cut.member(f"m{turn}", epoch)
        taken = member.acquire(afresh=True)
        epoch += 2
        if not isinstance(taken, LockTaken):
            continue
        todo = [offset for offset in range(1, count + 1) if not taken.has_settled(offset)]
        assert set(range(1, count + 1)) - set(todo) <= book.said
        todo.sort(key=lambda offset: (-(offset % KEYS), offset))
        one_member(book, member, todo, most=5 if turn < 6 else count)
        if turn == 1:
            plain.call(("DEL", plain.group.acks))
        if turn == 2:
            # As a call leaves them that ended between what it writes.
            plain.call(
                ("HSET", plain.group.lock, "top", 0),
                ("SET", plain.group.acks, "x"),
                ("HSET", plain.group.attempts, 1, "1:1:1"),
            )
        if turn == 5:
            cut.fence(epoch)
    plain.member("last", epoch + 1).acquire()
    book.check()


def one_member(book: Book, member: MemberScripts, todo: list[int], *, most: int) -> None:
    """Handle some messages, two with each call, and go: by releasing, or dead."""
    partition = book.partition
    for at in range(0, min(most, len(todo)), 2):
        some = todo[at : at + 2]
        for offset in some:
            member.start(offset, alone=True)
            member.count(offset, 1)
            book.handle(offset)
        ranges = as_ranges(sorted(some))
        book.said |= set(some)
        told = all_handled(ranges, some[-1], max_entries=3 if most > 5 else 100, letter="e" if at == 2 else "h")
        if not isinstance(member.settle(ranges, some, told), LockKept):
            return
        assert book.committed
        if at == 2:
            # As of a lock that was removed, and taken long ago.
            lock = partition.group.lock
            partition.call(("HDEL", lock, "outcome_count"), ("HSET", lock, "refreshed_at", 1))
        member.acquire()
        if at == 2 and member.holder.epoch == 5:
            partition.call(("DEL", partition.group.acks))
    if member.holder.epoch % 4 == 1:
        member.release()


def sought(world: World) -> None:
    """A group that is sent elsewhere starts there, whatever was settled before."""
    plain = world.plain()
    plain.fill(9)
    plain.member("a", 5).acquire()
    plain.member("a", 5).settle([(2, 4)])
    taken: object = None
    for seek, start in ((1, 3), (2, 2)):
        member = world.cut().member("a", 5 + seek)
        for _ in range(3):
            taken = member.acquire(start=start, seek=seek, afresh=True) or taken
        assert isinstance(taken, LockTaken)
        assert (taken.committed, taken.bits) == (start, b"")
        plain.member("a", 5 + seek).settle([(start + 2, start + 4)])


def shared_seek(world: World) -> None:
    """A shared group that is sent elsewhere starts there."""
    plain, cut = world.plain(), world.cut()
    plain.fill(9)
    for epoch, seek, start in ((1, 0, 1), (2, 1, 5)):
        for _ in range(3):
            cut.sharer("a", epoch, start, seek).acquire(afresh=True)
        sharer = plain.sharer("a", epoch, start, seek)
        assert sharer.read(3)[0][0] == b"%d-0" % start
        sharer.settle([(start, start)])
        sharer.nack([(start + 1, 1)])
    plain.seal()
    sharer = plain.sharer("a", 2, 5, 1)
    sharer.read(9)
    for _ in range(2):
        cut.sharer("a", 2, 5, 1).settle([(1, 9)], command=b"9-1")
    assert isinstance(sharer.acquire(), SharedDrained)


def wide(world: World) -> None:
    """So much is settled behind a blocked head that what is spent of the bitmap is cut off."""
    plain, last = world.plain(), 90
    plain.create()
    plain.add([last])
    said: set[int] = set()
    for epoch in range(1, TRIES):
        member = world.cut().member("a", epoch)
        taken = member.acquire(afresh=True)
        if not isinstance(taken, LockTaken):
            continue
        settled = {offset for offset in range(1, last + 1) if taken.has_settled(offset)}
        assert settled <= said
        if len(settled) == last:
            return
        for ranges in ([(2, 30), (32, 60)], [(1, 1)], [(63, 75)], [(31, 31), (61, last)]):
            said |= {offset for first, end in ranges for offset in range(first, end + 1)}
            if isinstance(member.settle(ranges), Fenced | None):
                break
    raise AssertionError("it never comes to the end")


def receivers(world: World) -> None:
    """Receivers of an ordered group that acknowledge, give back, extend, and ask again."""
    plain, cut, book = world.plain(), world.cut(), WholeBook(world, 14)
    receiver = cut.receiver("key", 2)
    for turn in range(6 * TRIES):
        if book.done:
            break
        if turn == 4:
            plain.call(("HSET", plain.group.lock, "wake_count", 0, "outcome_count", 0))
        receiver = cut.receiver("key", 1 if turn < 8 else 2, rate=RateShare(1e6, 1e6, 1e6) if turn % 2 else None)
        limit = 5 if turn % 3 == 1 else 3
        answer = receiver.receive(f"a{turn}", limit, 1)
        assert isinstance(answer, PopBatch | NoBatch | None)
        assert book.committed
        if isinstance(answer, PopBatch):
            receiver.receive(f"a{turn}", limit, 1)
            if turn == 6:
                plain.call(("DEL", plain.pops.queues))
            one_receiver(book, receiver, answer, turn)
    assert book.done
    # What was settled and had not left its lane is given again; nor does a lane's time stay where nothing stands in it.
    plain.call(("ZADD", plain.pops.due, 0, "k1"))
    receiver.receive("late", 1, 1)
    all_settled(book, receiver)


def all_settled(book: WholeBook, receiver: ReceiverScripts) -> None:
    """Have what is left given and acknowledged by another receiver."""
    place = receiver.place
    last = book.partition.receiver("key", place.epoch, rate=place.rate, classes=place.classes)
    turns = itertools.count()

    def is_clean() -> bool:
        if isinstance(answer := last.receive(f"last-{next(turns)}", 50, 1), PopBatch):
            last.settle("ack", tokens_of(answer))
        return book.left == 0

    # What was given and not settled comes again after its millisecond.
    wait_until(is_clean, what="nothing to be left")
    book.check()


def one_receiver(book: Book, receiver: ReceiverScripts, given: PopBatch, turn: int) -> None:
    for record in given.records:
        book.handle(record.offset)
    if turn % 3 == 1:
        receiver.settle("extend", tokens_of(given))
        receiver.settle("nack", tokens_of(given))
        return
    # The last one first, so that the bitmap is needed.
    tokens = tokens_of(given)[::-1]
    for some in (tokens[:1], tokens[1:]):
        if some:
            book.said |= {offset for _, offset in some}
            told = encode_pop_outcome("r", "e" if turn % 5 == 3 else "h", max_entries=3 if turn > 30 else 100)
            receiver.settle("ack", some, told=told)
            assert book.committed


def receivers_by_class(world: World) -> None:
    """Keys of two classes, each with one key out and a rate: settled, given back, late; what is kept of them goes."""
    plain, cut, book = world.plain(), world.cut(), WholeBook(world, 24)
    rule = key_class_rule("prefix:1")
    assert rule is not None
    classes = PopClasses(rule, 1, RateShare(1e4, 1e4, 1.0))
    receiver = cut.receiver("key", 1, classes=classes)
    turns = itertools.count()

    def is_done() -> bool:
        turn = next(turns)
        answer = receiver.receive(f"a{turn}", 4 if turn % 3 else 2, 1)
        assert book.committed
        if turn in (5, 9):
            plain.call(("DEL", plain.pops.ready if turn == 5 else plain.pops.class_out))
        if turn == 7:
            plain.call(("ZADD", plain.pops.ready, 0, "000" + "0" * 16 + "gone"), ("DEL", plain.pops.class_rates))
            plain.call(("ZADD", plain.pops.class_rates, 1, "unused", 1e15, "k"))
        if isinstance(answer, PopBatch) and turn % 4 != 3:
            one_receiver(book, receiver, answer, turn)
        return book.done

    wait_until(is_done, what="all to be settled")
    plain.call(("ZADD", plain.pops.due, 0, "k1"))
    receiver.receive("late", 1, 1)
    all_settled(book, receiver)
    # Without classes, what was kept of them goes.
    cut.receiver("key", 1).receive("plain", 1, 1)
    plain.receiver("key", 1).receive("plain", 1, 1)
    assert plain.call(("EXISTS", plain.pops.ready, plain.pops.class_out, plain.pops.class_rates)) == [0]


def failing_receivers(world: World) -> None:
    """Receivers that give some of a batch back, are late, ask again, and park."""
    plain, cut, book = world.plain(), world.cut(), WholeBook(world, 30)
    receiver = cut.receiver("key", 1)
    for turn in range(6 * TRIES):
        if book.done:
            break
        limit = 24 if turn % 3 else 5
        answer = receiver.receive(f"a{turn}", limit, 1, none_parked=1)
        assert book.committed
        if turn == 3:
            plain.call(("DEL", plain.pops.due))
        if not isinstance(answer, PopBatch):
            continue
        tokens = tokens_of(answer)
        if turn < 16:
            fail_some(receiver, f"a{turn}", limit, tokens, late=turn % 2 == 0)
            continue
        for record in answer.records:
            book.handle(record.offset)
        if turn % 2:
            receiver.settle("extend", tokens[:1], ms=1)
        told = encode_pop_outcome("r", max_entries=100)
        for action, some in (("ack", tokens[1:]), ("park", tokens[:1])):
            if some:
                book.said |= {offset for _, offset in some}
                receiver.settle(action, some, told=told)  # type: ignore[arg-type]
                assert book.committed
    assert book.done
    all_settled(book, receiver)


def fail_some(
    receiver: ReceiverScripts, attempt: str, limit: int, tokens: list[tuple[int, int]], *, late: bool
) -> None:
    if late:
        return
    receiver.settle("nack", tokens[-1:])
    receiver.receive(attempt, limit, 1)
    receiver.settle("extend", tokens[:1])
    receiver.settle("return", tokens[:1])


DROPPED_OF: Final = 36


def dropping(world: World) -> None:
    """A pass moves the position of each kind of group past what is kept no longer; what is kept is still to be had."""
    owned, popped, shared, new, late, lost, left = partitions = [world.plain(number) for number in range(1, 8)]
    for partition in partitions:
        partition.fill(DROPPED_OF)
    member = owned.member("a", 1)
    member.acquire()
    member.settle([(2, 3), (30, 34)])
    receiver = world.cut(2).receiver("key", 1)
    popped.receiver("key", 1).receive("a", 4, 1)
    shared.sharer("a", 1).acquire()
    shared.sharer("a", 1).read(5)
    # What is left of before a seek is void.
    new.member("a", 1).acquire()
    left.sharer("a", 1).acquire()
    two_batches(late)
    two_batches(lost)
    lost.call(("DEL", lost.group.acks))
    for bound in (10, 17, 30):
        for number, partition in enumerate(partitions, 1):
            drop_below(world, number, bound, seek=int(partition in (new, left)))
        # As if the lock had been lost meanwhile.
        owned.call(("HDEL", owned.group.lock, "outcome_count"))
        if bound == 10:
            # Some stand in queues below the next bound: those that are given back, and those behind them.
            for turn in range(3):
                answer = receiver.receive(f"b{turn}", 9, 1)
                if isinstance(answer, PopBatch):
                    receiver.settle("nack", tokens_of(answer)[1:])
    assert [one.committed for one in (popped, shared, new, late, left)] == [30] * 5
    taken = owned.member("b", 3).acquire()
    assert isinstance(taken, LockTaken)
    settled = {offset for offset in range(1, DROPPED_OF + 1) if taken.has_settled(offset)}
    # A bitmap that was not cut off with its base counts as lost.
    assert settled in (set(range(1, 35)), set(range(1, 30)))
    had: set[int] = set()

    def is_had() -> bool:
        answer = receiver.receive(f"c{len(had)}", 50, 1)
        if isinstance(answer, PopBatch):
            receiver.settle("ack", tokens_of(answer))
            had.update(record.offset for record in answer.records)
        return popped.committed == DROPPED_OF + 1

    wait_until(is_had, what="the rest to be given")
    assert min(had) >= 30


def two_batches(partition: PartitionHarness) -> None:
    """Have two batches given out that are remembered in one place."""
    receiver = partition.receiver("key", 1)
    for name in ("a", "b"):
        answer = receiver.receive(name, 3)
        assert isinstance(answer, PopBatch)
        if name == "a":
            receiver.settle("ack", tokens_of(answer)[1:2])
            partition.call(("HSET", partition.group.lock, "pop", 256))


def drop_below(world: World, number: int, bound: int, seek: int) -> None:
    """Drop by a call that may be cut, then by the next pass."""
    plain = world.plain(number)
    for partition in (world.cut(number), plain):
        reply: Any = plain.call(("XRANGE", plain.keys.log, f"{bound - 1}-0", f"{bound - 1}-0"))[0]
        partition.drop(LogBound(bound, bytes(reply[0][1][1]), True), GroupStart(GROUP, seek, 1), archived=True)


def far_receivers(world: World) -> None:
    """One message is behind for long: what is spent of the bitmap is cut off; and a record that somebody removed."""
    plain, receiver, last = world.plain(), world.cut().receiver("key", 1), 40
    plain.fill(3)
    plain.receiver("key", 1).receive("a", 1)
    # As if all but the head and what follows had been given and acknowledged.
    bits = b"\x7f" + b"\xff" * (last // 8 - 1)
    plain.add(range(last + 1, last + 4))
    plain.call(
        ("SET", plain.group.acks, bits), ("HSET", plain.group.lock, "base", 1, "top", last + 1, "examined", last + 1)
    )
    answer = receiver.receive("b", 3, 1)
    for n in range(8, 0, -1):
        receiver.settle("ack", [(n, last + 2), (n, 1)])
    plain.call(("XDEL", plain.keys.log, f"{last + 1}-0"))
    for n in range(2, 9):
        answer = receiver.receive(f"c{n}", 3, 1)
    assert isinstance(answer, PopBatch | NoBatch | None)
    assert plain.committed in (1, last + 1)


def many_batches(world: World) -> None:
    """More batches than are remembered; and a receiver whose group is sent elsewhere."""
    plain = world.plain()
    plain.fill(60)
    plain.receiver("key", 1).receive("a", 1)
    plain.call(("HSET", plain.group.lock, "pop", 4))
    receiver = world.cut().receiver("key", 2, 4, 1)
    for n in range(1, TRIES):
        answer = receiver.receive(f"b{n}", 7)
        if isinstance(answer, PopBatch):
            if n < 3:
                # Nothing is given of the lanes that are out: what is new stands in them.
                receiver.receive(f"held-{n}", 7)
            plain.receiver("key", 2, 4, 1).settle("ack", tokens_of(answer))
        elif isinstance(answer, NoBatch) and answer.status == "empty" and answer.wait_ms < 0:
            break


def sharers(world: World) -> None:
    """Members of a shared group that settle, give back, keep, vanish, and are taken from."""
    count = 14
    plain, cut, book = world.plain(), world.cut(), WholeBook(world, count, in_order=False)
    plain.seal()
    epoch, through = 1, False
    for turn in range(TRIES):
        if turn == 4:
            epoch = 3
            plain.fence(epoch)
        sharer = cut.sharer("abc"[turn % 3], epoch)
        answers = [sharer.acquire(afresh=afresh) for afresh in (True, False)]
        assert book.committed
        if None in answers:
            continue
        through = isinstance(answers[1], SharedDrained)
        if through:
            break
        sharer.reclaim() if turn % 3 == 2 else None
        one_sharer(book, sharer, turn)
        if turn in (1, 3):
            plain.call(("DEL", plain.pops.due if turn == 1 else plain.pops.queues))
        if turn == 8:
            plain.call(("HDEL", plain.group.lock, "outcome_count"))
        if turn == 5:
            plain.destroy_native_group()
    assert through
    plain.call(("HSET", plain.group.lock, "committed", 3))
    sharer = cut.sharer("a", epoch)
    for _ in range(2):
        sharer.acquire()
    for _ in range(3):
        sharer.reclaim()
        sharer.due(50)
        sharer.deferred(50)
        sharer.settle([(1, count)])
    book.check()


def one_sharer(book: Book, sharer: SharerScripts, turn: int) -> None:
    read = [entry_id for entry_id, _ in sharer.read(3, may_miss=True)]
    offsets = [int(entry_id[:-2]) for entry_id in read if entry_id.endswith(b"-0")]
    again = sharer.due(3)
    if isinstance(again, DueMessages):
        offsets += [record.offset for record in again.records]
        offsets += again.missing if set(again.missing) <= book.said else []
    waiting = sharer.deferred(3)
    if isinstance(waiting, DeferredMessages):
        offsets += [record.offset for record in waiting.due.records]
        offsets += waiting.due.missing if set(waiting.due.missing) <= book.said else []
    if turn % 5 == 3 and offsets:
        sharer.defer([(offset, b"%d" % (offset % 2)) for offset in offsets])
        return
    if turn % 4 == 1 and offsets:
        sharer.nack([(offset, 1 if offset % 2 else None) for offset in offsets])
        if turn < 9:
            return
        # Handled all the same, and said so while it is back.
        offsets = offsets[:1]
    if turn % 4 == 2 and offsets:
        sharer.attempt(offsets[0])
        sharer.extend(offsets)
        return
    for offset in offsets:
        book.handle(offset)
    if offsets:
        ranges = as_ranges(sorted(set(offsets)))
        book.said |= set(offsets)
        letter = "e" if turn % 5 == 4 else "h"
        told = all_handled(ranges, max(offsets), max_entries=3 if turn > 20 else 100, letter=letter)
        answer = sharer.settle(ranges, told=told)
        assert isinstance(answer, SharedSettled | None)
    # Whoever reads the command is gone: it is taken from it.


STORIES: Final = (
    sending, steps, trimmed, members, sought, wide, receivers, receivers_by_class, failing_receivers, dropping,
    far_receivers, many_batches, sharers, shared_seek,
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


@pytest.mark.parametrize("story", some_of(STORIES, 3), ids=lambda story: story.__name__)
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
