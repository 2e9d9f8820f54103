"""One member's ready, delayed and running key queues, under the dispatcher's lock."""

from __future__ import annotations

import heapq
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import count, groupby
from operator import attrgetter
from typing import Final

from mqlayer.consuming.engine.circuit_breaker import CircuitBreaker
from mqlayer.consuming.engine.clock import Lease, clock
from mqlayer.consuming.engine.fair_queue import FairQueue
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, OwnershipState, begin_all
from mqlayer.domain.routing import PartitionId

QUICK_S: Final = 0.0002
"""Below this time per message, workers take several key queues."""
CHUNK: Final = 32
WORTH_S: Final = 0.002
"""Ready work that justifies another worker; less than that, one worker takes as a whole."""
LARGEST_CHUNK: Final = 256
LEAST_S: Final = 1e-7

QueueKey = tuple[PartitionId, bytes]


class ReadyQueues:
    """Which key queue runs next. All but `note_pace` needs `lock`."""

    def __init__(self, lease: Lease, breaker: CircuitBreaker | None = None) -> None:
        self.lease, self.breaker = lease, breaker or CircuitBreaker()
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.stopping = False
        self.on_ready: Callable[[], None] | None = None
        self.on_parking: Callable[[], None] = _nothing
        self._idle = 0
        # Resumed key queues that workers finished.
        self._returned: deque[KeyQueue] = deque()
        self.ready: deque[KeyQueue] | FairQueue[KeyQueue] = deque()
        # Finished key queues. Appended without the lock: with one message per key, each message would take it.
        self._done: deque[KeyQueue] = deque()
        self.done: Callable[[KeyQueue], None] = self._done.append
        self._delayed: list[tuple[float, int, KeyQueue]] = []
        self._order = count()
        self.local_queues: list[deque[KeyQueue]] = []
        # Slow until measured: a first slow message must not delay others.
        self.message_s = WORTH_S
        # Keys that still run under a former ownership, and the later key queues that wait for them: a member that owns
        # its partition again must not run a key twice at once.
        self._still_running: Counter[QueueKey] = Counter()
        self._behind_running: dict[QueueKey, KeyQueue] = {}

    def new_local_queue(self) -> deque[KeyQueue]:
        """Return a worker's local queue."""
        local_queue: deque[KeyQueue] = deque()
        self.local_queues.append(local_queue)
        return local_queue

    def wait(self, timeout_s: float) -> bool:
        """Wait as an idle worker; say whether it was woken."""
        self._idle += 1
        try:
            return self.changed.wait(timeout_s)
        finally:
            self._idle -= 1

    def stop(self) -> None:
        """Give workers nothing more."""
        self.stopping = True
        self.changed.notify_all()

    def note_pace(self, messages: int, seconds: float) -> None:
        """Update the mean handler time."""
        if messages:
            self.message_s += 0.2 * (seconds / messages - self.message_s)

    def fill(self, local_queue: deque[KeyQueue]) -> bool:
        """Fill a local queue; say whether it has work."""
        self.collect_finished()
        if self.stopping or not self.lease.holds():
            return False
        if self.breaker.engaged:
            local_queue.extend(admitted(self))
            return bool(local_queue)
        ready, wanted = self.ready, _wanted(len(self.ready), len(self.local_queues), self.message_s)
        if isinstance(ready, FairQueue):
            while ready and len(local_queue) < wanted:
                key_queue = ready.popleft()
                if key_queue.owned.state is OwnershipState.OPEN:
                    key_queue.owned.begin(key_queue, ready.turn(key_queue))
                    local_queue.append(key_queue)
            return bool(local_queue)
        while ready and not local_queue:
            taken = [ready.popleft() for _ in range(min(wanted, len(ready)))]
            for owned, key_queues in groupby(taken, _owned):
                if owned.state is OwnershipState.OPEN:
                    local_queue.extend(begin_all(owned, key_queues))
        return bool(local_queue)

    def enqueue(self, key_queues: Iterable[KeyQueue]) -> None:
        """Make ready; keys that still run wait."""
        if self._still_running:
            key_queues = [key_queue for key_queue in key_queues if not self._wait_for_running(key_queue)]
        self.ready.extend(key_queues)
        self.wake()

    def park(self, key_queue: KeyQueue) -> None:
        """Give it to the parking worker."""
        key_queue.owned.to_park.add(key_queue)
        self.on_parking()

    def wake(self) -> None:
        """Wake workers for ready queues."""
        if self._idle:
            # A second worker pays off where the work exceeds what the first does during a wake-up.
            self.changed.notify(1 + int(len(self.ready) * min(1.0, self.message_s / WORTH_S)))
        if self.on_ready is not None:
            self.on_ready()

    def collect_finished(self) -> None:
        """Take back what workers finished."""
        done = self._done
        while done:
            # Many in one call: with one message per key, each message makes it.
            finished = [done.popleft() for _ in range(len(done))]
            for owned, key_queues in groupby(finished, _owned):
                for key_queue in owned.end_empty(key_queues):
                    self.finish(key_queue, 0.0)

    def finish(self, key_queue: KeyQueue, delay_s: float) -> None:
        """Take back a key queue with its remaining records."""
        owned = key_queue.owned
        if key_queue.counts_for is not None:
            end_turn(self.ready, key_queue)
        if key_queue.resumed and owned.state is not OwnershipState.GONE:
            key_queue.batch = ()
            self._returned.append(key_queue)
            self.on_parking()
            return
        owned.take_back(key_queue)
        if owned.state is not OwnershipState.OPEN:
            self.end(key_queue)
        elif not key_queue.records:
            owned.spilled.continue_or_end(key_queue)
        elif key_queue.parked_key is not None:
            self.park(key_queue)
        elif delay_s > 0:
            self.delay(key_queue, delay_s)
        else:
            self.ready.append(key_queue)
            if self.message_s >= QUICK_S:
                self.wake()

    def end(self, key_queue: KeyQueue) -> None:
        """End a closed partition's key queue."""
        owned = key_queue.owned
        if not key_queue.resumed:
            owned.forget(key_queue)
        queue_key = (owned.partition, key_queue.key)
        if owned.state is OwnershipState.GONE and queue_key in self._still_running:
            self._still_running[queue_key] -= 1
            if not self._still_running[queue_key]:
                del self._still_running[queue_key]
                waiting = self._behind_running.pop(queue_key, None)
                if waiting is not None:
                    self.enqueue([waiting])
        if owned.running == 0:
            self.changed.notify_all()

    def end_resumed(self, owned: OwnedPartition) -> None:
        """Count a key less that the parking worker has."""
        if owned.ended():
            self.changed.notify_all()

    def delay(self, key_queue: KeyQueue, seconds: float) -> None:
        """Spill a key queue until its backoff is over."""
        key_queue.owned.spilled.add(key_queue)
        heapq.heappush(self._delayed, (clock() + seconds, next(self._order), key_queue))

    def release_due(self) -> None:
        """Have due key queues reloaded."""
        now = clock()
        while self._delayed and self._delayed[0][0] <= now:
            key_queue = heapq.heappop(self._delayed)[2]
            key_queue.owned.spilled.backed_off(key_queue)

    def next_due_s(self) -> float:
        """Return seconds until a delay ends, or infinity."""
        return max(0.0, self._delayed[0][0] - clock()) if self._delayed else float("inf")

    def retry_now(self) -> None:
        """Make delayed key queues due."""
        self._delayed = [(0.0, number, key_queue) for _, number, key_queue in self._delayed]
        heapq.heapify(self._delayed)

    def runs_on(self, partition: PartitionId) -> bool:
        """Whether a dropped ownership's handler still runs."""
        return any(queue_key[0] == partition for queue_key in self._still_running)

    def take_waiting(self, key_queue: KeyQueue) -> bool:
        """Take a waiting key queue out, if it is."""
        queue_key = (key_queue.owned.partition, key_queue.key)
        if self._behind_running.get(queue_key) is key_queue:
            del self._behind_running[queue_key]
        elif key_queue in self.ready:
            self.ready.remove(key_queue)
        else:
            return False
        return True

    def take_returned(self, owned: OwnedPartition) -> list[KeyQueue]:
        """Take a partition's finished resumed key queues."""
        taken = [key_queue for key_queue in self._returned if key_queue.owned is owned]
        self._returned = deque(key_queue for key_queue in self._returned if key_queue.owned is not owned)
        return taken

    def put_back_returned(self, key_queues: list[KeyQueue]) -> None:
        """Take those back."""
        self._returned.extendleft(reversed(key_queues))

    def drop_waiting(self, owned: OwnedPartition) -> None:
        """Forget a partition's key queues that no worker has."""
        for key_queue in (*self.ready, *self._behind_running.values()):
            if key_queue.owned is owned and key_queue.resumed:
                # Delivered and not begun, but recorded as started in Postgres.
                self._returned.append(key_queue)
                self.on_parking()
        drop_queues(self.ready, owned)
        self._delayed = [entry for entry in self._delayed if entry[2].owned is not owned]
        heapq.heapify(self._delayed)
        self._behind_running = {
            s: key_queue for s, key_queue in self._behind_running.items() if key_queue.owned is not owned
        }
        owned.spilled.clear()
        owned.to_park.clear()
        self.changed.notify_all()

    def drop(self, owned: OwnedPartition) -> None:
        """Forget a partition; its running keys hold the next epoch."""
        owned.drop()
        self.drop_waiting(owned)
        key_queues = [*owned.queues.values(), *owned.parked.queues()]
        self._still_running.update((owned.partition, key_queue.key) for key_queue in key_queues if key_queue.batch)
        self.drop_parking(owned)

    def drop_parking(self, owned: OwnedPartition) -> None:
        """Forget a gone partition's parking tasks."""
        self.take_returned(owned)
        for key_queue, _ in owned.to_park.take_dead_letters():
            self.finish(key_queue, 0.0)

    def _wait_for_running(self, key_queue: KeyQueue) -> bool:
        queue_key = (key_queue.owned.partition, key_queue.key)
        if queue_key not in self._still_running:
            return False
        self._behind_running[queue_key] = key_queue
        return True


def end_turn(ready: deque[KeyQueue] | FairQueue[KeyQueue], key_queue: KeyQueue) -> None:
    """Count a class's running key less."""
    turn, key_queue.counts_for = key_queue.counts_for, None
    if turn is not None and isinstance(ready, FairQueue):
        ready.ended(turn)


def drop_queues(ready: deque[KeyQueue] | FairQueue[KeyQueue], owned: OwnedPartition) -> None:
    """Take a partition's key queues out."""
    if isinstance(ready, FairQueue):
        ready.keep(lambda key_queue: key_queue.owned is not owned)
    else:
        others = [key_queue for key_queue in ready if key_queue.owned is not owned]
        ready.clear()
        ready.extend(others)


def admitted(queues: ReadyQueues) -> list[KeyQueue]:
    """Return a key queue with one message, if the circuit breaker admits one."""
    while queues.ready and queues.breaker.room():
        key_queue = queues.ready.popleft()
        if key_queue.owned.state is OwnershipState.OPEN:
            key_queue.owned.begin(key_queue, 1)
            queues.breaker.begin(key_queue)
            return [key_queue]
    return []


_owned: Final[Callable[[KeyQueue], OwnedPartition]] = attrgetter("owned")


def is_quick(queues: ReadyQueues) -> bool:
    """Whether handlers take so little time that room comes soon."""
    return queues.message_s < QUICK_S


def _wanted(ready: int, workers: int, message_s: float) -> int:
    """Return how many key queues a worker takes."""
    if message_s >= QUICK_S:
        return 1
    share = min(CHUNK, 1 + ready // max(1, workers))
    return max(share, min(LARGEST_CHUNK, int(WORTH_S / max(LEAST_S, message_s))))


def _nothing() -> None:
    """Do nothing."""
