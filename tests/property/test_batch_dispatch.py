"""Lanes under any interleaving of readers, workers with batches, acks, failures and changes of owner (invariant 11)."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from mqlayer.consuming.batches import BatchOf
from mqlayer.consuming.clock import Lease
from mqlayer.consuming.gathering import BatchDispatcher, is_alone
from mqlayer.consuming.holdings import Lane, State
from tests.property.test_dispatch import AT_ONCE_S, WORKERS, Lanes, Worker


@dataclass
class BatchWorker(Worker):
    """A worker with the lanes of one batch."""

    lanes: list[Lane] = field(default_factory=list)


class BatchLanes(Lanes):
    """The same, whose workers take batches; some messages had failed attempts, or are to be given one by one."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.of = BatchOf(
            rng.choice(["distinct", "key"]), limit=rng.choice([1, 2, 5]), limit_bytes=rng.choice([40, 10**6])
        )
        lease = Lease()
        lease.until = float("inf")
        self.batching = BatchDispatcher(lease, self.of)
        self.dispatcher = self.batching
        self.batch_workers = [BatchWorker(deque()) for _ in range(WORKERS)]
        self.workers = [*self.batch_workers]
        self.held = self.open()

    def begin(self) -> None:
        """An idle worker takes a batch within its bounds; who has to be alone is."""
        worker = self.rng.choice(self.batch_workers)
        if worker.lanes:
            return
        worker.lanes = self.batching.take_batch_now()
        taken = [(lane, record) for lane in worker.lanes for record in lane.batch]
        assert len(taken) <= self.of.limit
        assert len(taken) == 1 or not any(is_alone(lane, record) for lane, record in taken)
        if self.of.kind == "distinct":
            assert all(len(lane.batch) == 1 for lane in worker.lanes)
            assert len({lane.key for lane in worker.lanes}) == len(worker.lanes)
        else:
            assert len(worker.lanes) <= 1

    def take_over(self) -> None:
        """Nobody takes from a batch."""

    def work(self) -> None:
        """A busy worker ends its batch: of each lane so many are handled, the next one fails or only comes again."""
        worker = self.rng.choice(self.batch_workers)
        lanes, worker.lanes = worker.lanes, []
        for lane in lanes:
            self.end_lane(worker, lane, self.rng.choice([0, len(lane.batch), self.rng.randint(0, len(lane.batch))]))

    def end_lane(self, worker: BatchWorker, lane: Lane, count: int) -> None:
        done = 0
        worker.lane = lane
        for record in lane.batch[:count]:
            if lane.held.state is State.OPEN:
                self.handle(worker, lane, record)
                done += 1
        worker.lane = None
        leftover = list(lane.batch[done:])
        if not leftover:
            self.dispatcher.done(lane)
            return
        match self.rng.choice(["failed", "singly", "again"]):
            case "failed":
                lane.held.attempts[leftover[0].offset] = 1
                self.dispatcher.finish(lane, leftover, delay_s=AT_ONCE_S)
            case "singly":
                lane.singly = leftover[-1].offset + 1
                self.dispatcher.finish(lane, leftover)
            case _:
                self.dispatcher.finish(lane, leftover)

    def handle(self, worker: Worker, lane: Lane, record: object) -> None:
        """Nobody else has a message of this key in its batch."""
        others = [w for w in self.batch_workers if w is not worker and any(other.key == lane.key for other in w.lanes)]
        assert others == []
        super().handle(worker, lane, record)  # type: ignore[arg-type]

    def end(self) -> None:
        """Nothing is forgotten: once failures end, everything is handled and settled."""
        self.end_what_is_begun()
        self.acknowledge()
        self.lose_and_get_again()
        for _ in range(6 * len(self.server.log) + 6):
            self.read()
            self.refill()
            self.batch_workers[0].lanes = self.batching.take_batch_now()
            self.end_what_is_begun()
            self.acknowledge()
        assert self.server.committed == len(self.server.log) + 1
        handled = {offset for offsets in self.handled.values() for offset in offsets}
        assert handled == {record.offset for record in self.server.log if self.matches(record)}
        assert not self.held.lanes
        assert (self.held.count_in_hand, self.held.bytes_in_hand, self.held.folded) == (0, 0, 0)
        assert not self.dispatcher._orphans

    def end_what_is_begun(self) -> None:
        for worker in self.batch_workers:
            lanes, worker.lanes = worker.lanes, []
            for lane in lanes:
                self.end_lane(worker, lane, len(lane.batch))


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_batches_keep_each_key_in_order_and_forget_nothing(seed: int) -> None:
    """Invariant 11: per key one message is out, or one batch of the key."""
    lanes = BatchLanes(random.Random(seed))
    for _ in range(300):
        lanes.step()
        lanes.what_is_in_hand_is_counted()
    lanes.end()
