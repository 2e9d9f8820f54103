"""Hand lanes to a bounded number of workers: different keys side by side, one key strictly in order.

Workers take several lanes at a time while handlers are quick, so that the lock is not the price of a message; a worker
that has nothing to do takes from those that have lanes left, so a slow message never holds the lanes beside it.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Final

from mqlayer.consuming.clock import clock
from mqlayer.consuming.holdings import Held, Lane, State
from mqlayer.domain.message import Record

QUICK_S: Final = 0.0002
"""Handlers that take less than this on average are given several lanes at a time."""
CHUNK: Final = 32
LOOK_AGAIN_S: Final = 0.05
"""How soon an idle worker looks at what busy ones still have beside a slow message."""


class Dispatcher:
    """The ready line of lanes, the delayed ones, and what workers have in hand. One per member.

    `lock` guards every field of holdings and lanes marked (lock).
    """

    def __init__(self, *, lease_holds: Callable[[], bool]) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.stopping = False
        self._lease_holds = lease_holds
        self._ready: deque[Lane] = deque()
        self._delayed: list[tuple[float, int, Lane]] = []
        self._order = count()
        self._hands: list[deque[Lane]] = []
        self._idle = 0
        self._message_s = QUICK_S
        self.on_ready: Callable[[], None] | None = None

    def new_hand(self) -> deque[Lane]:
        """Return where one worker keeps the lanes that it took; others may take from its far end."""
        hand: deque[Lane] = deque()
        with self.lock:
            self._hands.append(hand)
        return hand

    def put(self, held: Held, records: list[Record]) -> None:
        """Add records that were read, in order."""
        with self.lock:
            self._ready.extend(held.admit(records))
            self._wake()

    def take(self, hand: deque[Lane], timeout_s: float) -> bool:
        """Fill an empty hand, waiting up to the time; say whether there is anything in it."""
        with self.changed:
            if not self._fill(hand):
                self._idle += 1
                try:
                    self.changed.wait(self._patience(timeout_s))
                finally:
                    self._idle -= 1
                self._fill(hand)
            return bool(hand)

    def take_now(self, hand: deque[Lane]) -> bool:
        """Fill an empty hand without waiting."""
        with self.lock:
            return self._fill(hand)

    def next_due_s(self) -> float:
        """Return how long until a delayed lane is due; infinite where none is."""
        with self.lock:
            return max(0.0, self._delayed[0][0] - clock()) if self._delayed else float("inf")

    def finish(self, lane: Lane, leftover: list[Record], *, delay_s: float = 0.0) -> None:
        """Take a lane back from a worker: what it did not settle goes in front again."""
        with self.lock:
            held = lane.held
            held.busy -= 1
            if leftover:
                lane.records[:0] = leftover
            lane.batch = []
            if held.state is not State.OPEN:
                held.lanes.pop(lane.key, None)
                if held.busy == 0:
                    self.changed.notify_all()
            elif not lane.records:
                del held.lanes[lane.key]
            elif delay_s > 0:
                heapq.heappush(self._delayed, (clock() + delay_s, next(self._order), lane))
                self._wake()
            else:
                self._ready.append(lane)
                if self._message_s >= QUICK_S:
                    self._wake()

    def note_pace(self, messages: int, seconds: float) -> None:
        """Learn how long a message takes, for the number of lanes taken at a time."""
        if messages:
            self._message_s += 0.2 * (seconds / messages - self._message_s)

    def forget(self, held: Held) -> None:
        """Drop what waits of a holding that is not open any more; what is under way ends by itself."""
        with self.lock:
            self._ready = deque(lane for lane in self._ready if lane.held is not held)
            self._delayed = [entry for entry in self._delayed if entry[2].held is not held]
            heapq.heapify(self._delayed)
            self.changed.notify_all()

    def acknowledged(self, held: Held, records: list[Record]) -> None:
        """Make room for what the server knows to be settled."""
        with self.lock:
            held.count_in_hand -= len(records)
            held.bytes_in_hand -= sum(len(m) + len(key) + len(body) for _, m, key, body in records)

    def stop(self) -> None:
        """Let workers end."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        if self.on_ready is not None:
            self.on_ready()

    def _fill(self, hand: deque[Lane]) -> bool:
        self._release_due()
        if self.stopping:
            return False
        wanted = min(CHUNK, 1 + len(self._ready) // max(1, len(self._hands))) if self._message_s < QUICK_S else 1
        may_start, ready = self._lease_holds(), self._ready
        while ready and may_start and len(hand) < wanted:
            lane = ready.popleft()
            if lane.held.state is State.OPEN:
                lane.batch, lane.records = lane.records, []
                lane.held.busy += 1
                hand.append(lane)
        if not hand:
            self._take_over(hand)
        return bool(hand)

    def _take_over(self, hand: deque[Lane]) -> None:
        """Take one lane that another worker has in hand and did not begin."""
        for other in self._hands:
            try:
                hand.append(other.pop())
            except IndexError:
                continue
            return

    def _release_due(self) -> None:
        now = clock()
        while self._delayed and self._delayed[0][0] <= now:
            self._ready.append(heapq.heappop(self._delayed)[2])

    def _patience(self, timeout_s: float) -> float:
        if self._delayed:
            timeout_s = min(timeout_s, max(0.0, self._delayed[0][0] - clock()))
        if any(self._hands):
            timeout_s = min(timeout_s, LOOK_AGAIN_S)
        return timeout_s

    def _wake(self) -> None:
        """Wake as many idle workers as the ready line is worth."""
        if self._idle:
            quick = self._message_s < QUICK_S
            self.changed.notify(1 + len(self._ready) // CHUNK if quick else len(self._ready) or 1)
        if self.on_ready is not None:
            self.on_ready()
