"""Classes of keys: who goes next, and how much of a class is in memory."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mqlayer.consuming.engine.class_limits import ClassLimits
from mqlayer.consuming.engine.fair_queue import TURN, FairQueue
from mqlayer.consuming.ordered.class_backlogs import ClassBacklogs
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, key_queue_of
from mqlayer.consuming.ordered.ready_queues import end_turn
from mqlayer.domain.key_classes import KeyClassRule, check_key_class, key_class_rule
from mqlayer.domain.message import NO_KEY, Record
from mqlayer.domain.rates import RateLimit
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.errors import InvalidInput
from mqlayer.groups.members import Assignment
from mqlayer.redis.partition_scripts import LockHolder

TENANTS = "abcdef"


def rule(text: str = "prefix:/") -> KeyClassRule:
    found = key_class_rule(text)
    assert found is not None
    return found


def owned_partition() -> OwnedPartition:
    assigned = Assignment(PartitionId(1), NodeId(1), 0, 1024, 1, 1, release=False)
    return OwnedPartition(assigned, LockHolder("p", 1, 1, "m", 1))


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 40)), min_size=1, max_size=60))
def test_classes_with_messages_waiting_begin_as_many_as_each_other(key_queues: list[tuple[str, int]]) -> None:
    """Between any two that wait all the time, one turn of the longest and one message are the difference."""
    owned, ready = owned_partition(), FairQueue[KeyQueue](rule())
    waiting: Counter[str] = Counter()
    for number, (tenant, messages) in enumerate(key_queues):
        record = Record(number, b"1:0:1:0", f"{tenant}/{number}".encode(), b"")
        key_queue = key_queue_of(owned, record.key, record)
        key_queue.records = [record] * messages
        ready.append(key_queue)
        waiting[tenant] += 1
    begun: Counter[str] = Counter()
    while ready:
        key_queue = ready.popleft()
        tenant = key_queue.key[:1].decode()
        owned.begin(key_queue, TURN)
        begun[tenant] += len(key_queue.batch)
        if key_queue.records:
            ready.append(key_queue)
        else:
            waiting[tenant] -= 1
        counts = [begun[one] for one in waiting if waiting[one]]
        assert not counts or max(counts) - min(counts) <= 2 * TURN
    assert begun == Counter({t: sum(n for one, n in key_queues if one == t) for t, _ in key_queues})


def test_a_class_that_was_idle_neither_saved_up_nor_owes() -> None:
    owned, ready = owned_partition(), FairQueue[KeyQueue](rule())
    taken: list[bytes] = []

    def add(name: bytes, count: int) -> None:
        for number in range(count):
            record = Record(1, b"1:0:1:0", b"%b/%d" % (name, number), b"")
            ready.append(key_queue_of(owned, record.key, record))

    def take(count: int) -> None:
        for _ in range(count):
            key_queue = ready.popleft()
            owned.begin(key_queue, 1)
            taken.append(key_queue.key[:1])

    add(b"a", 100)
    take(50)
    add(b"b", 100)
    take(20)
    assert Counter(taken[50:]) == Counter({b"a": 10, b"b": 10})


@given(st.integers(0, 2**32))
def test_no_class_begins_more_than_its_limits_and_nothing_is_left(seed: int) -> None:
    rng, owned = random.Random(seed), owned_partition()
    key_queues = [(rng.choice("ab"), rng.randint(1, 40)) for _ in range(rng.randint(1, 30))]
    concurrency = rng.randint(1, 3)
    ready = FairQueue[KeyQueue](rule(), limits=ClassLimits(concurrency, RateLimit.of(40.0, None)))
    for number, (tenant, messages) in enumerate(key_queues):
        record = Record(number, b"1:0:1:0", f"{tenant}/{number}".encode(), b"")
        key_queue = key_queue_of(owned, record.key, record)
        key_queue.records = [record] * messages
        ready.append(key_queue)
    running: list[KeyQueue] = []
    granted: Counter[bytes] = Counter()
    begun: Counter[bytes] = Counter()
    while ready or running or len(ready):
        if ready and rng.random() < 0.5:
            key_queue = ready.popleft()
            owned.begin(key_queue, ready.turn(key_queue))
            running.append(key_queue)
            begun[key_queue.key[:1]] += len(key_queue.batch)
        elif running:
            key_queue = running.pop(rng.randrange(len(running)))
            handled = rng.randint(0, len(key_queue.batch))
            begun[key_queue.key[:1]] -= len(key_queue.batch) - handled
            key_queue.put_back(key_queue.batch[handled:])
            end_turn(ready, key_queue)
            if key_queue.records:
                ready.append(key_queue)
        else:
            for name, permits in ready.wanted(10).items():
                ready.grant(name, permits)
                granted[name] += round(permits)
        at_once = Counter(key_queue.key[:1] for key_queue in running)
        assert all(count <= concurrency for count in at_once.values())
        assert all(begun[name] <= granted[name] for name in begun)
    assert begun == Counter({t.encode(): sum(n for one, n in key_queues if one == t) for t, _ in key_queues})


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 3)), max_size=200), st.integers(1, 20))
@example([("a", 0)] * 40 + [("b", 0)], 8)
def test_one_class_never_takes_all_room_and_offsets_come_back_in_order(
    messages: list[tuple[str, int]], limit: int
) -> None:
    backlogs = ClassBacklogs(rule())
    backlogs.bound(limit, 1 << 30)
    records = [Record(n, b"1:0:1:0", f"{t}/{k}".encode(), b"") for n, (t, k) in enumerate(messages)]
    waiting: deque[Record] = deque()

    def count(record: Record, change: int) -> None:
        backlogs.share_of(record).count(change)

    def keep(taken: list[Record]) -> None:
        for record in taken:
            count(record, 1)
        waiting.extend(taken)

    keep(backlogs.admit(records, 0, 0))
    of_class = Counter(record.key[:1] for record in waiting)
    assert all(one <= max(1, (limit + 1) // 2) for one in of_class.values())
    assert set(of_class) == {record.key[:1] for record in records} or len(waiting) >= 2 * limit
    handled: list[Record] = []
    while waiting or backlogs:
        if waiting:
            handled.append(waiting.popleft())
            count(handled[-1], -1)
        found = backlogs.to_load(len(waiting), 0, 1.0, 500)
        if found is not None:
            name, offsets = found
            backlogs.loaded(name, offsets)
            keep([records[offset] for offset in offsets])
    assert Counter(handled) == Counter(records)
    for tenant in TENANTS:
        of_tenant = [record.offset for record in handled if record.key.startswith(tenant.encode())]
        assert of_tenant == sorted(of_tenant)


def test_a_message_has_one_class() -> None:
    plain = Record(1, b"1:0:1:0", b"plain", b"")
    assert rule().of(plain) == rule().of(plain._replace(key=NO_KEY)) == b""
    assert rule("prefix:::").of(plain._replace(key=b"a::b::c")) == b"a"
    by_header = rule("header:tenant")
    assert by_header.of(plain) == b""
    assert by_header.of(plain._replace(m=b'1:0:1:0:{"tenant":"acme"}')) == b"acme"
    assert key_class_rule("none") is None
    check_key_class("header:tenant")
    with pytest.raises(InvalidInput, match="mqlayer's own"):
        check_key_class("header:mq-ttl")
