"""Lanes under any interleaving of readers, workers, acks, failures and changes of owner.

A walk of many weighted random steps from one seed goes deeper here than rules drawn one by one.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from mqlayer.consuming.clock import Lease
from mqlayer.consuming.dispatch import Dispatcher
from mqlayer.consuming.holdings import Held, Lane, State, size_of
from mqlayer.domain.message import NO_KEY, Record
from mqlayer.domain.offsets import as_ranges
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.membership.members import Assigned
from mqlayer.redis.partitions import Holder, Taken

WORKERS = 3
KEYS = (b"a", b"a", b"b", b"c", NO_KEY)
AT_ONCE_S = 1e-9


@dataclass
class Server:
    """What the partition holds and what it knows to be settled."""

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
class Worker:
    """A hand, and the lane in it that is begun."""

    hand: deque[Lane]
    lane: Lane | None = None
    done: int = 0


class Lanes:
    """One partition, its owner coming and going in one process, and three workers."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        # With a filter, so many of ten messages match.
        self.matching = rng.choice([0, 1, 5, 10])
        self.server = Server()
        lease = Lease()
        lease.until = float("inf")
        self.dispatcher = Dispatcher(lease)
        self.dispatcher._message_s = 0.0  # as with quick handlers: several lanes in a hand
        self.workers = [Worker(self.dispatcher.new_hand()) for _ in range(WORKERS)]
        self.handled: dict[bytes, list[int]] = {key: [] for key in KEYS}
        self.epoch = 0
        self.held = self.open()

    def open(self) -> Held:
        self.epoch += 1
        assigned = Assigned(PartitionId(1), NodeId(1), 0, 1024, self.epoch, 1, release=False)
        held = Held(assigned, Holder("p", 1, 1, "m", self.epoch))
        committed = self.server.committed
        taken = Taken(committed, len(self.server.log) + 1, committed, self.server.bitmap(), {})
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
            (8, self.refill),
            (1, self.lose_and_get_again),
            (1, self.drain),
            (4, self.release_and_get_again),
        ]
        weights, acts = zip(*steps, strict=True)
        self.rng.choices(acts, weights)[0]()

    def worker(self, *, begun: bool) -> Worker | None:
        fitting = [worker for worker in self.workers if begun is (worker.lane is not None)]
        return self.rng.choice(fitting) if fitting else None

    def append(self) -> None:
        for _ in range(self.rng.randint(1, 8)):
            self.server.log.append(Record(len(self.server.log) + 1, b"1:0:1:0", self.rng.choice(KEYS), b"body"))

    def read(self) -> None:
        records = self.server.log[self.held.next_read - 1 :][: self.rng.randint(1, 8)]
        if records and self.matching == 10:
            self.dispatcher.put(self.held, records)
        elif records:
            unmatched = as_ranges(record.offset for record in records if not self.matches(record))
            matched = [record for record in records if self.matches(record)]
            self.dispatcher.put(self.held, matched, last=records[-1].offset, unmatched=unmatched)

    def matches(self, record: Record) -> bool:
        return record.offset * 7 % 10 < self.matching

    def begin(self) -> None:
        """An idle worker fills its hand where that is empty, and begins the first lane in it."""
        worker = self.worker(begun=False)
        if worker and (worker.hand or self.dispatcher.take_now(worker.hand)):
            worker.lane, worker.done = worker.hand.popleft(), 0

    def take_over(self) -> None:
        worker = self.worker(begun=False)
        if worker and not worker.hand:
            self.dispatcher._take_over(worker.hand)

    def work(self) -> None:
        """A busy worker handles some of its lane's messages, and gives the lane back or not."""
        worker = self.worker(begun=True)
        if worker is None or worker.lane is None:
            return
        lane = worker.lane
        for record in lane.batch[worker.done : worker.done + self.rng.randint(0, 3)]:
            if lane.held.state is State.OPEN:
                self.handle(worker, lane, record)
        if self.rng.random() < 0.6:
            leftover = list(lane.batch[worker.done :])
            if leftover:
                self.dispatcher.finish(lane, leftover, delay_s=AT_ONCE_S if self.rng.random() < 0.5 else 0.0)
            else:
                self.dispatcher.done(lane)
            worker.lane = None

    def handle(self, worker: Worker, lane: Lane, record: Record) -> None:
        """Nobody else may be at this key, and nothing before the message may be left out."""
        assert [w for w in self.workers if w.lane is not None and w.lane.key == lane.key] == [worker]
        assert record.offset not in self.server.settled
        if record.key != NO_KEY:
            of_key = [r for r in self.server.log[: record.offset - 1] if r.key == record.key]
            before = {r.offset for r in of_key if self.matches(r)}
            assert before <= set(self.handled[record.key])
        self.handled[record.key].append(record.offset)
        lane.held.settled.append(record)
        worker.done += 1

    def acknowledge(self) -> None:
        if self.held.state is not State.GONE:
            records = list(self.held.settled)
            self.held.settled.clear()
            self.server.settled.update(record.offset for record in records)
            for first, last in self.held.unmatched:
                self.server.settled.update(range(first, last + 1))
            self.held.unmatched.clear()
            self.dispatcher.acknowledged(self.held, records)

    def refill(self) -> None:
        for lane in self.dispatcher.refills(self.held):
            wanted = list(lane.later or [])[: self.rng.randint(1, 3)]
            self.dispatcher.refill(lane, [self.server.log[offset - 1] for offset in wanted], len(wanted))

    def lose_and_get_again(self) -> None:
        self.dispatcher.drop(self.held)
        self.held = self.open()

    def drain(self) -> None:
        self.dispatcher.drain(self.held, 0.0)

    def release_and_get_again(self) -> None:
        if self.held.state is State.DRAINING and (self.dispatcher.drained(self.held) or self.rng.random() < 0.2):
            self.acknowledge()
            self.lose_and_get_again()

    def what_is_in_hand_is_counted(self) -> None:
        if self.held.state is not State.OPEN or self.rng.random() < 0.5:
            return
        self.dispatcher.drained(self.held)  # takes back what is done
        lanes = self.held.lanes.values()
        in_memory = {record for lane in lanes for record in (*lane.records, *lane.batch)} | set(self.held.settled)
        in_memory = {record for record in in_memory if record.offset not in self.server.settled}
        placeholders = sum(lane.later is not None and not lane.records and not lane.batch for lane in lanes)
        assert self.held.count_in_hand == len(in_memory) + placeholders
        assert self.held.bytes_in_hand == sum(map(size_of, in_memory))
        assert self.held.folded == sum(lane.later is not None for lane in lanes)
        assert self.held.busy == sum(bool(lane.batch) for lane in lanes)

    def end(self) -> None:
        """Nothing is forgotten: once failures end, everything is handled and settled."""
        self.end_what_is_begun()
        self.acknowledge()
        self.lose_and_get_again()
        for _ in range(5 * len(self.server.log) + 5):
            self.read()
            self.refill()
            self.dispatcher.take_now(self.workers[0].hand)
            self.end_what_is_begun()
            self.acknowledge()
        assert self.server.committed == len(self.server.log) + 1
        handled = {offset for offsets in self.handled.values() for offset in offsets}
        assert handled == {record.offset for record in self.server.log if self.matches(record)}
        assert not self.held.lanes
        assert (self.held.count_in_hand, self.held.bytes_in_hand, self.held.folded) == (0, 0, 0)
        assert not self.dispatcher._orphans

    def end_what_is_begun(self) -> None:
        for worker in self.workers:
            while worker.lane is not None or worker.hand:
                if worker.lane is None:
                    worker.lane, worker.done = worker.hand.popleft(), 0
                lane = worker.lane
                if lane.held.state is State.OPEN:
                    for record in lane.batch[worker.done :]:
                        self.handled[record.key].append(record.offset)
                        lane.held.settled.append(record)
                        worker.done += 1
                self.dispatcher.finish(lane, list(lane.batch[worker.done :]))
                worker.lane = None


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_a_key_is_handled_in_order_by_one_worker_at_a_time_and_nothing_is_forgotten(seed: int) -> None:
    lanes = Lanes(random.Random(seed))
    for _ in range(300):
        lanes.step()
        lanes.what_is_in_hand_is_counted()
    lanes.end()
