"""A walk of random steps through a dispatcher: readers, workers, acks, failures and changes of owner."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mqlayer.consuming.engine.class_limits import ClassLimits
from mqlayer.consuming.engine.clock import Lease
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, OwnershipState
from mqlayer.consuming.ordered.results import size_of
from mqlayer.domain.key_classes import key_class_rule
from mqlayer.domain.message import NO_KEY, Record
from mqlayer.domain.offsets import as_ranges
from mqlayer.domain.rates import RateLimit
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.groups.members import Assignment
from mqlayer.redis.partition_scripts import LockHolder, LockTaken

WORKERS = 3
KEYS = (b"t/a", b"t/a", b"t/b", b"u/c", NO_KEY)
RULES = tuple(map(key_class_rule, ("none", "prefix:/", "header:tenant")))
HEADERS = (b"", b':{"tenant":"t"}', b':{"tenant":"u"}')
MEMORY = 4
"""Messages in memory where classes have backlogs."""
AT_ONCE_S = 1e-9


@dataclass
class WalkPartition:
    """The partition: its messages, and the offsets that are settled."""

    log: list[Record] = field(default_factory=list)
    settled: set[int] = field(default_factory=set)

    @property
    def committed(self) -> int:
        return next(offset for offset in range(1, len(self.log) + 2) if offset not in self.settled)

    def bitmap(self) -> bytes:
        bits = bytearray(len(self.log) // 8 + 1)
        for offset in self.settled:
            if offset >= self.committed:
                bits[(offset - self.committed) // 8] |= 0x80 >> (offset - self.committed) % 8
        return bytes(bits)


@dataclass
class WalkWorker:
    """A hand, and the key queue in it that is begun."""

    local_queue: deque[KeyQueue]
    queue: KeyQueue | None = None
    done: int = 0


class DispatchWalk:
    """One partition, its owner coming and going in one process, and three workers."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        # With a filter, so many of ten messages match.
        self.matching = rng.choice([0, 1, 5, 10])
        self.server = WalkPartition()
        lease = Lease()
        lease.until = float("inf")
        self.classes = rng.choice([RULES[:1], RULES[1:2], RULES[2:], RULES])
        self.dispatcher = Dispatcher(lease)
        self.dispatcher._queues.message_s = 0.0  # as with quick handlers: several key queues in a hand
        self.change_classes()
        self.workers = [WalkWorker(self.dispatcher.new_local_queue()) for _ in range(WORKERS)]
        self.handled: dict[bytes, list[int]] = {key: [] for key in KEYS}
        self.epoch = 0
        self.owned = self.open()

    def open(self) -> OwnedPartition:
        self.epoch += 1
        assigned = Assignment(PartitionId(1), NodeId(1), 0, 1024, self.epoch, 1, release=False)
        held = OwnedPartition(assigned, LockHolder("p", 1, 1, "m", self.epoch))
        committed = self.server.committed
        taken = LockTaken(committed, len(self.server.log) + 1, committed, self.server.bitmap(), {})
        self.dispatcher.open(held, taken)
        return held

    def step(self) -> None:
        """Take one random step."""
        steps: list[tuple[int, Callable[[], None]]] = [
            (6, self.append),
            (10, self.read),
            (20, self.begin),
            (2, self.take_over),
            (30, self.work),
            (6, self.acknowledge),
            (8, self.reload),
            (8, self.load),
            (8, self.grant),
            (1, self.change_classes),
            (1, self.lose_and_get_again),
            (1, self.drain),
            (4, self.release_and_get_again),
        ]
        weights, acts = zip(*steps, strict=True)
        self.rng.choices(acts, weights)[0]()

    def worker(self, *, begun: bool) -> WalkWorker | None:
        fitting = [worker for worker in self.workers if begun is (worker.queue is not None)]
        return self.rng.choice(fitting) if fitting else None

    def append(self) -> None:
        for _ in range(self.rng.randint(1, 8)):
            facts, key = b"1:0:1:0" + self.rng.choice(HEADERS), self.rng.choice(KEYS)
            self.server.log.append(Record(len(self.server.log) + 1, facts, key, b"body"))

    def read(self) -> None:
        if self.dispatcher.classes.may_read(self.owned, (MEMORY, 1000), keeps=True) is False:
            return
        records = self.server.log[self.owned.next_read - 1 :][: self.rng.randint(1, 8)]
        if records and self.matching == 10:
            self.dispatcher.put(self.owned, records)
        elif records:
            unmatched = as_ranges(record.offset for record in records if not self.matches(record))
            matched = [record for record in records if self.matches(record)]
            self.dispatcher.put(self.owned, matched, last=records[-1].offset, unmatched=unmatched)

    def matches(self, record: Record) -> bool:
        return record.offset * 7 % 10 < self.matching

    def begin(self) -> None:
        """An idle worker fills its hand where that is empty, and begins the first key queue in it."""
        worker = self.worker(begun=False)
        if worker and (worker.local_queue or self.dispatcher.fill(worker.local_queue, 0.0)):
            worker.queue, worker.done = worker.local_queue.popleft(), 0

    def take_over(self) -> None:
        worker = self.worker(begun=False)
        if worker and not worker.local_queue:
            self.dispatcher.steal(worker.local_queue)

    def work(self) -> None:
        """A busy worker handles some of its key queue's messages, and gives the key queue back or not."""
        worker = self.worker(begun=True)
        if worker is None or worker.queue is None:
            return
        key_queue = worker.queue
        for record in key_queue.batch[worker.done : worker.done + self.rng.randint(0, 3)]:
            if key_queue.owned.state is OwnershipState.OPEN:
                self.handle(worker, key_queue, record)
        if self.rng.random() < 0.6:
            leftover = list(key_queue.batch[worker.done :])
            if leftover:
                self.dispatcher.finish(key_queue, leftover, delay_s=AT_ONCE_S if self.rng.random() < 0.5 else 0.0)
            else:
                self.dispatcher.done(key_queue)
            worker.queue = None

    def handle(self, worker: WalkWorker, key_queue: KeyQueue, record: Record) -> None:
        """No other worker is at this key, and no earlier message of it is left out."""
        assert [w for w in self.workers if w.queue is not None and w.queue.key == key_queue.key] == [worker]
        assert record.offset not in self.server.settled
        if record.key != NO_KEY:
            of_key = [r for r in self.server.log[: record.offset - 1] if r.key == record.key]
            before = {r.offset for r in of_key if self.matches(r)}
            assert before <= set(self.handled[record.key])
        self.handled[record.key].append(record.offset)
        key_queue.owned.results.handled.append(record)
        worker.done += 1

    def acknowledge(self) -> None:
        if self.owned.state is not OwnershipState.GONE:
            unsettled = self.owned.results.take()
            records = unsettled.records
            self.server.settled.update(record.offset for record in records)
            for first, last in unsettled.unmatched:
                self.server.settled.update(range(first, last + 1))
            self.dispatcher.settled(self.owned, records, 0, unsettled.unmatched)

    def reload(self) -> None:
        for key_queue in self.dispatcher.queues_to_reload(self.owned):
            wanted = list(key_queue.spilled or [])[: self.rng.randint(1, 3)]
            self.dispatcher.reload(key_queue, [self.server.log[offset - 1] for offset in wanted], len(wanted))

    def load(self) -> None:
        found = self.dispatcher.classes.to_load(self.owned, self.rng.randint(1, 8))
        if found is not None:
            name, offsets = found
            self.dispatcher.classes.load(self.owned, name, offsets, [self.server.log[o - 1] for o in offsets])

    def change_classes(self) -> None:
        rate = RateLimit.of(self.rng.choice([None, 10.0]), None)
        limits = ClassLimits(self.rng.choice([None, 1, 2]), rate)
        self.dispatcher.classes.follow(self.rng.choice(self.classes), limits)

    def grant(self) -> None:
        self.dispatcher.classes.grant(self.dispatcher.classes.wanted(10))

    def lose_and_get_again(self) -> None:
        self.dispatcher.drop(self.owned)
        self.owned = self.open()

    def drain(self) -> None:
        self.dispatcher.drain(self.owned, 0.0)

    def release_and_get_again(self) -> None:
        if self.owned.state is OwnershipState.DRAINING and (
            self.dispatcher.is_idle(self.owned) or self.rng.random() < 0.2
        ):
            self.acknowledge()
            self.lose_and_get_again()

    def what_is_in_hand_is_counted(self) -> None:
        if self.owned.state is not OwnershipState.OPEN or self.rng.random() < 0.5:
            return
        self.dispatcher.is_idle(self.owned)  # takes back what is done
        lanes = self.owned.queues.values()
        in_memory = {record for key_queue in lanes for record in (*key_queue.records, *key_queue.batch)} | set(
            self.owned.results.handled
        )
        in_memory = {record for record in in_memory if record.offset not in self.server.settled}
        placeholders = sum(
            key_queue.spilled is not None and not key_queue.records and not key_queue.batch for key_queue in lanes
        )
        assert self.owned.room.count == len(in_memory) + placeholders
        assert self.owned.room.bytes == sum(map(size_of, in_memory))
        assert self.owned.room.spilled == sum(key_queue.spilled is not None for key_queue in lanes)
        for share in {id(one.share): one.share for one in lanes if one.share is not None}.values():
            assert share.waiting == sum(len(key_queue.records) for key_queue in lanes if key_queue.share is share)
        assert self.owned.running == sum(bool(key_queue.batch) for key_queue in lanes)

    def end(self) -> None:
        """Nothing is forgotten: once failures end, everything is handled and settled."""
        self.end_what_is_begun()
        self.acknowledge()
        self.lose_and_get_again()
        for _ in range(5 * len(self.server.log) + 5):
            self.read()
            self.load()
            self.grant()
            self.reload()
            self.dispatcher.fill(self.workers[0].local_queue, 0.0)
            self.end_what_is_begun()
            self.acknowledge()
        self.assert_all_is_settled()

    def assert_all_is_settled(self) -> None:
        """Each message that matches was handled, all are settled, and nothing takes room any more."""
        assert self.server.committed == len(self.server.log) + 1
        handled = {offset for offsets in self.handled.values() for offset in offsets}
        assert handled == {record.offset for record in self.server.log if self.matches(record)}
        assert not self.owned.queues
        assert not self.owned.backlogs
        assert (self.owned.room.count, self.owned.room.bytes, self.owned.room.spilled) == (0, 0, 0)
        assert not self.dispatcher._queues._still_running

    def end_what_is_begun(self) -> None:
        for worker in self.workers:
            while worker.queue is not None or worker.local_queue:
                if worker.queue is None:
                    worker.queue, worker.done = worker.local_queue.popleft(), 0
                key_queue = worker.queue
                if key_queue.owned.state is OwnershipState.OPEN:
                    for record in key_queue.batch[worker.done :]:
                        self.handled[record.key].append(record.offset)
                        key_queue.owned.results.handled.append(record)
                        worker.done += 1
                self.dispatcher.finish(key_queue, list(key_queue.batch[worker.done :]))
                worker.queue = None
