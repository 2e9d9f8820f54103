"""Hand out batches: the first messages of several keys, or several messages of one key, under the same lanes.

What a worker has of a lane is one batch at most, and the lane waits in line again for its next one, so one key's
messages stay in order. Alone in its batch is a message that failed before, that may have killed former owners, or that
was in a batch which failed as a whole: none beside it is to pay for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from mqlayer.consuming.batches import BatchOf
from mqlayer.consuming.clock import Lease, clock
from mqlayer.consuming.dispatch import Dispatcher
from mqlayer.consuming.holdings import Held, Lane, State, size_of
from mqlayer.consuming.workers import TURN_S
from mqlayer.domain.message import NO_KEY, ParkedRecord, Record

SHORTEST_WAIT_S = 0.001


class BatchDispatcher(Dispatcher):
    """A dispatcher whose workers take batches. One per member."""

    def __init__(self, lease: Lease, batch_of: BatchOf) -> None:
        super().__init__(lease)
        self._of = batch_of

    def take_batch(self, timeout_s: float) -> list[Lane]:
        """Return lanes with what is to be handled of each at once, waiting up to the time; empty where nothing is."""
        with self.changed:
            lanes = self._gather()
            if not lanes and not self.stopping:
                self._idle += 1
                try:
                    self.changed.wait(self._wait_s(timeout_s))
                finally:
                    self._idle -= 1
                lanes = self._gather()
            return lanes

    def take_batch_now(self) -> list[Lane]:
        """Return the same without waiting."""
        with self.lock:
            return self._gather()

    def note_full(self, held: Held, *, full: bool) -> None:
        """Note whether more of a holding comes in; what waits for that goes without it."""
        if held.full != full:
            with self.lock:
                held.full = full
                if full:
                    self._wake()

    def batch_due_s(self, timeout_s: float) -> float:
        """Return how long until what waits for others is handed out without them, `timeout_s` at most."""
        with self.lock:
            return self._wait_s(timeout_s)

    def _wait_s(self, timeout_s: float) -> float:
        if not self._ready or not self._of.linger_s or not self.lease.holds():
            return timeout_s
        due_s = self._ready[0].since + self._of.linger_s - clock()
        return max(SHORTEST_WAIT_S, min(timeout_s, due_s))

    def _line_up(self, lanes: list[Lane]) -> None:
        now = clock()
        for lane in lanes:
            lane.since = now
        super()._line_up(lanes)

    def _finish(self, lane: Lane, delay_s: float) -> None:
        lane.since = clock()
        held = lane.held
        goes_on = lane.resumed and lane.records and lane.verdict is None and self._in_turn(lane)
        if goes_on and held.state is State.OPEN and not held.finished:
            # More of it came from Postgres at once than a batch takes: the keeper is told later.
            lane.batch = ()
            self._ready.append(lane)
        else:
            super()._finish(lane, delay_s)

    def _in_turn(self, lane: Lane) -> bool:
        """Say whether a parked key goes on with what was fetched of it, before the keeper looks whether it may.

        One whose batch failed as a whole does, or its messages would be put into a batch again.
        """
        return lane.parking is None or lane.singly > 0 or clock() < lane.parking.given + TURN_S

    def _gather(self) -> list[Lane]:
        self._take_back()
        if self.stopping or not self.lease.holds():
            return []
        lanes = list(self._of_one_key() if self._of.kind == "key" else self._of_distinct_keys())
        for lane in lanes:
            count = self._count(lane) if self._of.kind == "key" else 1
            lane.batch, lane.records = lane.records[:count], lane.records[count:]
            # One from Postgres counts as under way until what came of it is written there.
            lane.held.busy += not lane.resumed
        return lanes

    def _of_distinct_keys(self) -> list[Lane]:
        """Take the lanes of a batch off the ready line, the first message of each; none where it may get fuller."""
        ready, lanes, size, full = self._ready, list[Lane](), 0, False
        while ready and not full:
            lane = ready.popleft()
            if lane.held.state is not State.OPEN:
                continue
            record = lane.records[0]
            alone, size = is_alone(lane, record), size + size_of(record)
            if lanes and (alone or size > self._of.limit_bytes):
                ready.appendleft(lane)
                break
            lanes.append(lane)
            full = alone or len(lanes) == self._of.limit
        else:
            if lanes and not full and self._may_linger(lanes[0]) and not any(lane.held.full for lane in lanes):
                ready.extendleft(reversed(lanes))
                return []
        return lanes

    def _of_one_key(self) -> Iterator[Lane]:
        """Take the first lane off the ready line that is full, or waited long enough."""
        for lane in self._ready:
            if lane.held.state is State.OPEN and (self._is_full(lane) or not self._may_linger(lane)):
                self._ready.remove(lane)
                yield lane
                return

    def _may_linger(self, lane: Lane) -> bool:
        # Where nothing can be read any more, no batch gets fuller by waiting.
        return self._of.linger_s > 0 and not lane.held.full and clock() < lane.since + self._of.linger_s

    def _is_full(self, lane: Lane) -> bool:
        """Say whether a batch of a key gets no fuller by waiting."""
        if len(lane.records) >= self._of.limit or lane.later is not None or lane.resumed:
            return True
        # What has no key has a lane of its own, to which nothing comes.
        return lane.key.startswith(NO_KEY) or self._count(lane) < len(lane.records) or is_alone(lane, lane.records[0])

    def _count(self, lane: Lane) -> int:
        """Return how many of a lane's first messages make a batch."""
        if is_alone(lane, lane.records[0]):
            return 1
        size = 0
        for count, record in enumerate(lane.records[: self._of.limit]):
            size += size_of(record)
            if count and (size > self._of.limit_bytes or is_alone(lane, record)):
                return count
        return min(len(lane.records), self._of.limit)


def is_alone(lane: Lane, record: Record) -> bool:
    """Say whether a message is handled in a batch by itself."""
    if record.offset < lane.caution or record.offset < lane.singly:
        return True
    if isinstance(record, ParkedRecord):
        return record.attempts > 0 or (lane.parking is not None and lane.parking.careful > 0)
    return bool(lane.held.attempts.get(record.offset))
