"""Key queues under any interleaving of readers, workers with batches, acks, failures and changes of owner (invariant
11)."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from mqlayer.consuming.api.batches import BatchOf
from mqlayer.consuming.engine.clock import Lease
from mqlayer.consuming.ordered.batch_dispatch import BatchDispatcher, is_alone
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnershipState
from tests.proof.dispatch_walk import AT_ONCE_S, WORKERS, DispatchWalk, WalkWorker


@dataclass
class BatchWalkWorker(WalkWorker):
    """A worker with the key queues of one batch."""

    queues: list[KeyQueue] = field(default_factory=list)


class BatchWalk(DispatchWalk):
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
        self.change_classes()
        self.batch_workers = [BatchWalkWorker(deque()) for _ in range(WORKERS)]
        self.workers = [*self.batch_workers]
        self.owned = self.open()

    def begin(self) -> None:
        """An idle worker takes a batch within its bounds; who has to be alone is."""
        worker = self.rng.choice(self.batch_workers)
        if worker.queues:
            return
        worker.queues = self.batching.take_batch(0.0)
        taken = [(key_queue, record) for key_queue in worker.queues for record in key_queue.batch]
        assert len(taken) <= self.of.limit
        assert len(taken) == 1 or not any(is_alone(key_queue, record) for key_queue, record in taken)
        if self.of.kind == "distinct":
            assert all(len(key_queue.batch) == 1 for key_queue in worker.queues)
            assert len({key_queue.key for key_queue in worker.queues}) == len(worker.queues)
        else:
            assert len(worker.queues) <= 1

    def take_over(self) -> None:
        """Nobody takes from a batch."""

    def work(self) -> None:
        """A busy worker ends its batch: of each key queue so many are handled, the next one fails or only comes
        again."""
        worker = self.rng.choice(self.batch_workers)
        lanes, worker.queues = worker.queues, []
        for key_queue in lanes:
            self.end_queue(
                worker, key_queue, self.rng.choice([0, len(key_queue.batch), self.rng.randint(0, len(key_queue.batch))])
            )

    def end_queue(self, worker: BatchWalkWorker, key_queue: KeyQueue, count: int) -> None:
        done = 0
        worker.queue = key_queue
        for record in key_queue.batch[:count]:
            if key_queue.owned.state is OwnershipState.OPEN:
                self.handle(worker, key_queue, record)
                done += 1
        worker.queue = None
        leftover = list(key_queue.batch[done:])
        if not leftover:
            self.dispatcher.done(key_queue)
            return
        match self.rng.choice(["failed", "singly", "again"]):
            case "failed":
                key_queue.owned.attempts.count(leftover[0].offset, 1)
                self.dispatcher.finish(key_queue, leftover, delay_s=AT_ONCE_S)
            case "singly":
                key_queue.singly = leftover[-1].offset + 1
                self.dispatcher.finish(key_queue, leftover)
            case _:
                self.dispatcher.finish(key_queue, leftover)

    def handle(self, worker: WalkWorker, key_queue: KeyQueue, record: object) -> None:
        """Nobody else has a message of this key in its batch."""
        others = [
            w for w in self.batch_workers if w is not worker and any(other.key == key_queue.key for other in w.queues)
        ]
        assert others == []
        super().handle(worker, key_queue, record)  # type: ignore[arg-type]

    def end(self) -> None:
        """Nothing is forgotten: once failures end, everything is handled and settled."""
        self.end_what_is_begun()
        self.acknowledge()
        self.lose_and_get_again()
        for _ in range(6 * len(self.server.log) + 6):
            self.read()
            self.load()
            self.grant()
            self.reload()
            self.batch_workers[0].queues = self.batching.take_batch(0.0)
            self.end_what_is_begun()
            self.acknowledge()
        self.assert_all_is_settled()

    def end_what_is_begun(self) -> None:
        for worker in self.batch_workers:
            lanes, worker.queues = worker.queues, []
            for key_queue in lanes:
                self.end_queue(worker, key_queue, len(key_queue.batch))


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_batches_keep_each_key_in_order_and_forget_nothing(seed: int) -> None:
    """Invariant 11: per key one message is out, or one batch of the key."""
    walk = BatchWalk(random.Random(seed))
    for _ in range(300):
        walk.step()
        walk.what_is_in_hand_is_counted()
    walk.end()
