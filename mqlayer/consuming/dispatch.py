"""Hand lanes to a bounded number of workers: different keys side by side, one key strictly in order.

Workers take several lanes at a time while handlers are quick, so that the lock is not the price of a message. An idle
worker looks again after a moment, and takes over half of what a busy one still has in hand, so a slow message never
holds the lanes beside it for long. What they have done comes back with the next thing that takes the lock.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from mqlayer.consuming.clock import Lease, clock
from mqlayer.consuming.holdings import Held, Lane, State, resumed_lane
from mqlayer.consuming.parked import NEVER, Parking
from mqlayer.consuming.verdicts import Bury
from mqlayer.domain.message import Identity, ParkedRecord, Record
from mqlayer.domain.offsets import Range
from mqlayer.domain.routing import PartitionId
from mqlayer.parking import Burial, Loaded
from mqlayer.redis.partitions import Taken

QUICK_S: Final = 0.0002
"""Handlers that take less than this on average are given several lanes at a time."""
CHUNK: Final = 32
WORTH_S: Final = 0.002
"""As much work is worth one more worker."""
LOOK_AGAIN_S: Final = 0.05
"""How soon a watching worker takes over what a busy one has beside a slow message."""

Spot = tuple[PartitionId, bytes]


@dataclass(slots=True)
class ParkingWork:
    """What a keeper takes of one holding at a time."""

    lanes: list[Lane] = field(default_factory=list)
    burials: list[tuple[Lane, Burial]] = field(default_factory=list)
    back: list[Lane] = field(default_factory=list)
    due: list[Parking] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.lanes or self.burials or self.back or self.due)


class Dispatcher:
    """The ready line of lanes, the delayed ones, and what workers have in hand. One per member.

    `lock` guards every field of holdings and lanes marked (lock).
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.stopping = False
        self.on_ready: Callable[[], None] | None = None
        # Called when the keeper has something to do.
        self.on_parking: Callable[[], None] = _nothing
        # Resumed lanes that workers gave back, for the keeper.
        self._back: deque[Lane] = deque()
        self._ready: deque[Lane] = deque()
        # Lanes handled to the end, appended without the lock, which would be the price of every message of its own key.
        self._done: deque[Lane] = deque()
        self.done: Callable[[Lane], None] = self._done.append
        self._delayed: list[tuple[float, int, Lane]] = []
        self._order = count()
        self._hands: list[deque[Lane]] = []
        self._idle = 0
        self._watching = 0
        # Slow until they show that they are quick: a first slow message must not keep the others waiting.
        self._message_s = WORTH_S
        # Keys that still run under a holding that is gone, and the lanes of later holdings that wait for them: a member
        # that got its partition again must not run a key twice at a time.
        self._orphans: Counter[Spot] = Counter()
        self._behind_orphans: dict[Spot, Lane] = {}

    def new_hand(self) -> deque[Lane]:
        """Return where one worker keeps the lanes that it took; others may take from its far end."""
        hand: deque[Lane] = deque()
        with self.lock:
            self._hands.append(hand)
        return hand

    def put(
        self, held: Held, records: list[Record], *, last: int | None = None, unmatched: Sequence[Range] = ()
    ) -> None:
        """Add records that were read, in order.

        With a filter: `last` is the last offset that was looked at, `unmatched` what the filter leaves out, in order.
        """
        with self.lock:
            self._take_back()
            if held.state is State.OPEN:
                if unmatched:
                    held.leave_out(unmatched)
                self._line_up(held.admit(records, records[-1].offset if last is None else last))
                if held.to_park:
                    self.on_parking()

    def note_full(self, held: Held, *, full: bool) -> None:
        """Note whether a holding has no room for what else is in its stream."""
        held.full = full

    def take(self, hand: deque[Lane], timeout_s: float) -> bool:
        """Fill an empty hand, waiting up to the time; say whether there is anything in it."""
        with self.changed:
            if not self._fill(hand):
                watching = not self._watching and any(self._hands)
                self._idle += 1
                self._watching += watching
                try:
                    called = self.changed.wait(min(timeout_s, LOOK_AGAIN_S) if watching else timeout_s)
                finally:
                    self._idle -= 1
                    self._watching -= watching
                if not self._fill(hand) and not called and not self.stopping:
                    self._take_over(hand)
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
            if leftover:
                lane.records[:0] = leftover
            self._finish(lane, delay_s)

    def drained(self, held: Held) -> bool:
        """Say whether nothing of a holding is under way any more."""
        with self.lock:
            self._take_back()
            return held.busy == 0

    def refills(self, held: Held) -> list[Lane]:
        """Return the folded lanes of a holding that are to be read again now."""
        with self.lock:
            self._take_back()
            self._release_due()
            lanes = list(held.to_refill)
            held.to_refill.clear()
            return lanes

    def refill(self, lane: Lane, records: list[Record], asked: int) -> None:
        """Go on with a folded lane, with what was read again of its first `asked` offsets."""
        with self.lock:
            if lane.held.state is State.OPEN:
                lane.held.refill(lane, records, asked)
                if lane.records:
                    self._line_up_or_park(lane)

    def not_refilled(self, held: Held, lanes: list[Lane]) -> None:
        """Take lanes back that could not be read again."""
        with self.lock:
            held.to_refill.extendleft(reversed(lanes))

    def note_pace(self, messages: int, seconds: float) -> None:
        """Learn how long a message takes, for the number of lanes taken at a time."""
        if messages:
            self._message_s += 0.2 * (seconds / messages - self._message_s)

    def open(self, held: Held, taken: Taken) -> None:
        """Start a holding, unless it is not wanted any more."""
        with self.lock:
            if held.state is State.NEW:
                held.start_at(taken)

    def drain(self, held: Held, until: float) -> None:
        """Start nothing more of a holding; what is under way may end until then."""
        with self.lock:
            self._take_back()
            if held.state is not State.GONE:
                held.drain_until = until
                held.state = State.DRAINING
                self._forget(held)

    def drop(self, held: Held) -> None:
        """Forget a holding; what of it is under way ends by itself and comes to nothing."""
        with self.lock:
            self._take_back()
            if held.state is not State.GONE:
                held.state = State.GONE
                self._forget(held)
                lanes = [*held.lanes.values(), *held.parked.lanes()]
                self._orphans.update((held.partition, lane.key) for lane in lanes if lane.batch)
                self._abandon(held)

    def runs_on(self, partition: PartitionId) -> bool:
        """Say whether a handler still runs under an earlier holding of a partition, which is gone."""
        with self.lock:
            self._take_back()
            return any(spot[0] == partition for spot in self._orphans)

    def acknowledged(self, held: Held, records: list[Record]) -> None:
        """Make room for what the server knows to be settled."""
        with self.lock:
            held.let_go(records)
            if held.parked.by_offset and held.parked.all_settled(records):
                self.on_parking()

    def left_out(self, held: Held, unmatched: Sequence[Range]) -> None:
        """Note that the server has settled what the group's filter leaves out."""
        with self.lock:
            if held.parked.by_offset and held.parked.all_left_out(unmatched):
                self.on_parking()

    # -- parked keys: failures of workers, and the keeper ------------------------------------------------------------

    def park(self, lane: Lane, leftover: list[Record], parking: Parking) -> None:
        """Take a lane back whose key is to be parked, the failed message first."""
        with self.lock:
            lane.records[:0] = leftover
            if lane.held.state is State.OPEN and lane.parking is None:
                lane.parking = parking
                lane.held.parked.add(parking)
            self._finish(lane, 0.0)

    def bury(self, lane: Lane, leftover: list[Record], burial: Burial) -> None:
        """Take a lane back whose first message is to leave the group; it is under way until that is written."""
        with self.lock:
            lane.records[:0] = leftover[1:]
            if lane.held.state is not State.OPEN:
                self._finish(lane, 0.0)
            else:
                lane.batch = leftover[:1]
                lane.held.to_bury.append((lane, burial))
                self.on_parking()

    def load_parked(self, held: Held, loaded: Loaded, parkings: list[Parking], taken: Taken) -> None:
        """Let a holding that is not open yet know what is parked and dead of it."""
        with self.lock:
            for parking in parkings:
                held.parked.add(parking)
            for ref, offset in loaded.unsettled:
                known = held.parked.by_name.get(ref.name)
                if known is not None and offset < taken.next_offset and not taken.has_settled(offset):
                    held.parked.await_settling(known, offset)
            held.dead = loaded.dead

    def learn_dead(self, held: Held, dead: set[Identity]) -> None:
        """Have an open holding pass over what is dead, once its keys are in line again."""
        with self.lock:
            held.dead |= dead

    def reload_parked(self, held: Held, parkings: list[Parking], named: set[bytes] | None = None) -> None:
        """Follow what others did to parked keys: new ones, ended ones, other times. What is started goes on.

        `named`: only to these, and `parkings` are those of them that are parked.
        """
        with self.lock:
            if held.state is not State.OPEN:
                return
            found = {parking.ref.name: parking for parking in parkings}
            by_name = held.parked.by_name
            for known in list(by_name.values()) if named is None else [by_name[n] for n in named if n in by_name]:
                there = found.pop(known.ref.name, None)
                if known.entry is not None or known.lane is not None:
                    continue
                if there is None:
                    self._unpark(held, known)
                else:
                    known.attempts = there.attempts
                    held.parked.schedule(known, there.due)
            for parking in found.values():
                self._adopt(held, parking)

    def parking_work(self, held: Held, limits: tuple[int, int, int]) -> ParkingWork:
        """Take what the keeper is to write of a holding: messages, bytes and newly started keys up to these limits."""
        with self.lock:
            self._take_back()
            work = ParkingWork()
            if held.state is State.GONE:
                return work
            work.back = [lane for lane in self._back if lane.held is held]
            self._back = deque(lane for lane in self._back if lane.held is not held)
            if held.state is State.OPEN:
                count, size, starts = limits
                if not held.finished and self.lease.holds():
                    work.due = [p for p in held.parked.ripe(clock()) if self._may_start(held, p)][: max(0, starts)]
                    held.parked.take_ripe(work.due)
                    # Under way from here: whoever follows when this is drained would start them too.
                    held.busy += len(work.due)
                if held.unsure:
                    # What may be parked already, first: its key must not go on from Postgres before that is known.
                    held.to_park = deque(sorted(held.to_park, key=lambda lane: not lane.unsure))
                while held.to_park and (held.to_park[0].unsure or (count > 0 and size > 0)):
                    lane = held.to_park.popleft()
                    taken, lane.unsure = lane.unsure or count, 0
                    lane.batch, lane.records = lane.records[:taken], lane.records[taken:]
                    held.busy += 1
                    work.lanes.append(lane)
                    count -= len(lane.batch)
                    size -= sum(len(record.body) for record in lane.batch)
            work.burials = list(held.to_bury)
            held.to_bury.clear()
            return work

    def not_kept(self, held: Held, work: ParkingWork) -> None:
        """Take work back that could not be written; it is asked for again, or comes to nothing with its holding."""
        with self.lock:
            self._back.extendleft(reversed(work.back))
            held.to_bury.extendleft(reversed(work.burials))
            for parking in work.due:
                held.parked.schedule(parking, parking.due)
                self._rest(held)
            for lane in reversed(work.lanes):
                lane.records[:0] = lane.batch
                lane.unsure = len(lane.batch)
                held.unsure = True
                self._finish(lane, 0.0)
            if held.state is State.GONE:
                self._abandon(held)

    def kept(self, held: Held, lane: Lane, *, parked: bool) -> None:
        """Take back a lane whose messages are parked now, or not, where its key is in line again."""
        with self.lock:
            parking = lane.parking
            if parked and parking is not None:
                parking.entry = None
                held.passed.extend(lane.batch)
                self._finish(lane, 0.0)
                return
            lane.records[:0] = lane.batch
            if held.state is State.GONE or parking is None:
                self._finish(lane, 0.0)
            elif parking.lane is None:
                held.parked.remove(parking)
                lane.parking = None
                held.pass_over_dead(lane)
                self._finish(lane, 0.0)
            else:
                # A handler has a message of the key, though an operator ended its being parked: this one waits for it.
                lane.batch = ()
                self._rest(held)

    def left(self, held: Held, lane: Lane, left: set[Identity], *, parked: bool, again_s: float) -> None:
        """Take back a lane of whose messages these found no room: they wait in the stream, and are read again.

        `parked`: the others of it are parked; else its key is not, and its head is tried again in place.
        """
        with self.lock:
            parking = lane.parking
            if parking is not None and parked:
                parking.entry = None
            elif parking is not None:
                held.parked.remove(parking)
                lane.parking = None
            lane.records[:0] = [record for record in lane.batch if record.identity in left]
            # Not as handled: whoever parked them tells it.
            held.passed.extend(record for record in lane.batch if record.identity not in left)
            lane.batch = ()
            held.busy -= 1
            if held.state is not State.OPEN:
                self._end(lane)
            else:
                self._delay(lane, again_s)

    def buried(self, lane: Lane) -> None:
        """Take back a lane whose first message has left the group."""
        with self.lock:
            lane.held.passed.extend(lane.batch)
            self._finish(lane, 0.0)

    def resume(self, held: Held, parking: Parking, records: list[ParkedRecord]) -> None:
        """Give the first messages of a parked key to the workers; with none, put the key in line again."""
        with self.lock:
            if parking.lane is not None:
                gone = len(parking.lane.line) + isinstance(parking.lane.verdict, Bury)
                parking.careful = max(0, parking.careful - gone)
            parking.lane = None
            if not records:
                self._rest(held)
                self._unpark(held, parking)
                return
            parking.attempts = records[0].attempts
            lane = resumed_lane(held, parking, records)
            if held.state is State.OPEN:
                self._line_up([lane])
            elif held.state is State.DRAINING:
                self._finish(lane, 0.0)

    def rest(self, held: Held, parking: Parking, attempts: int, due: float) -> None:
        """Let a parked key wait again: what came of its messages is written."""
        with self.lock:
            parking.lane, parking.attempts, parking.died = None, attempts, False
            held.parked.schedule(parking, due)
            self._rest(held)
            lane = held.lanes.get(parking.ref.name)
            if lane is not None and lane.records and not lane.batch and lane not in held.to_park:
                held.to_park.append(lane)

    def finish_holding(self, held: Held) -> bool:
        """Start nothing more of a holding whose messages are all settled; say whether nothing is under way."""
        with self.lock:
            self._take_back()
            held.finished = True
            return held.busy == 0

    def next_parking_s(self, holdings: list[Held]) -> float:
        """Return how long until a parked key of some holdings is due and may be started; infinite where none is."""
        with self.lock:
            if not self.lease.holds():
                return NEVER
            starting = [held for held in holdings if held.state is State.OPEN and not held.finished]
            due = min((held.parked.next_due() for held in starting), default=NEVER)
        return max(0.0, due - clock())

    def hurry(self) -> None:
        """Let every lane that waits for its backoff be due now: another rule may be in force."""
        with self.lock:
            self._delayed = [(0.0, number, lane) for _, number, lane in self._delayed]
            heapq.heapify(self._delayed)

    def _may_start(self, held: Held, parking: Parking) -> bool:
        """Say whether a due key may be started: the server knows it, nothing of it is under way or to be settled."""
        if parking.entry is not None or parking.lane is not None or parking.unsettled:
            return False
        lane = held.lanes.get(parking.ref.name)
        return lane is None or not lane.batch

    def _rest(self, held: Held) -> None:
        """A resumed lane is not under way any more."""
        held.busy -= 1
        if held.busy == 0:
            self.changed.notify_all()

    def _unpark(self, held: Held, parking: Parking) -> None:
        """Put a key in line: what was read of it, and is not parked, goes to the workers."""
        held.parked.remove(parking)
        lane = held.lanes.get(parking.ref.name)
        if lane is not None and lane.parking is parking:
            lane.parking, lane.unsure = None, 0
            if lane.records and not lane.batch:
                if lane in held.to_park:
                    held.to_park.remove(lane)
                held.pass_over_dead(lane)
                if lane.records:
                    self._line_up([lane])
                else:
                    held.end_or_unfold(lane)

    def _adopt(self, held: Held, parking: Parking) -> None:
        """Park a key that somebody else has parked: what was read of it goes behind what is parked."""
        held.parked.add(parking)
        lane = held.lanes.get(parking.ref.name)
        if lane is not None:
            lane.parking = parking
            spot = (held.partition, lane.key)
            if self._behind_orphans.get(spot) is lane:
                del self._behind_orphans[spot]
            elif lane in self._ready:
                self._ready.remove(lane)
            else:
                return
            held.to_park.append(lane)
            self.on_parking()

    def _abandon(self, held: Held) -> None:
        """Let go of what waits for the keeper of a holding that is gone."""
        self._back = deque(lane for lane in self._back if lane.held is not held)
        while held.to_bury:
            self._finish(held.to_bury.popleft()[0], 0.0)

    def stop(self) -> None:
        """Let workers end."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        if self.on_ready is not None:
            self.on_ready()

    def _take_back(self) -> None:
        """Take back the lanes that workers have handled to the end."""
        done = self._done
        while done:
            self._finish(done.popleft(), 0.0)

    def _finish(self, lane: Lane, delay_s: float) -> None:
        held = lane.held
        if lane.resumed and held.state is not State.GONE:
            lane.batch = ()
            self._back.append(lane)
            self.on_parking()
            return
        held.busy -= 1
        lane.batch = ()
        if held.state is not State.OPEN:
            self._end(lane)
        elif not lane.records:
            held.end_or_unfold(lane)
        elif lane.parking is not None:
            held.to_park.append(lane)
            self.on_parking()
        elif delay_s > 0:
            self._delay(lane, delay_s)
        else:
            self._ready.append(lane)
            if self._message_s >= QUICK_S:
                self._wake()

    def _delay(self, lane: Lane, seconds: float) -> None:
        """Let a lane wait, with the offsets of its messages only."""
        lane.held.fold(lane)
        lane.held.asleep += 1
        heapq.heappush(self._delayed, (clock() + seconds, next(self._order), lane))

    def _line_up(self, lanes: list[Lane]) -> None:
        if self._orphans:
            lanes = [lane for lane in lanes if not self._hold_back(lane)]
        self._ready.extend(lanes)
        self._wake()

    def _hold_back(self, lane: Lane) -> bool:
        """Let a lane wait while its key still runs under an earlier holding."""
        spot = (lane.held.partition, lane.key)
        if spot not in self._orphans:
            return False
        self._behind_orphans[spot] = lane
        return True

    def _end(self, lane: Lane) -> None:
        """A lane of a holding that is not open came back."""
        held = lane.held
        if not lane.resumed:
            held.lanes.pop(lane.key, None)
        spot = (held.partition, lane.key)
        if held.state is State.GONE and spot in self._orphans:
            self._orphans[spot] -= 1
            if not self._orphans[spot]:
                del self._orphans[spot]
                waiting = self._behind_orphans.pop(spot, None)
                if waiting is not None:
                    self._line_up([waiting])
        if held.busy == 0:
            self.changed.notify_all()

    def _forget(self, held: Held) -> None:
        """Drop what waits of a holding."""
        for lane in (*self._ready, *self._behind_orphans.values()):
            if lane.held is held and lane.resumed:
                # Handed out and not begun: the server says "started" of it.
                self._back.append(lane)
                self.on_parking()
        self._ready = deque(lane for lane in self._ready if lane.held is not held)
        self._delayed = [entry for entry in self._delayed if entry[2].held is not held]
        heapq.heapify(self._delayed)
        self._behind_orphans = {s: lane for s, lane in self._behind_orphans.items() if lane.held is not held}
        held.to_refill.clear()
        held.to_park.clear()
        self.changed.notify_all()

    def _fill(self, hand: deque[Lane]) -> bool:
        self._take_back()
        if self.stopping or not self.lease.holds():
            return False
        ready = self._ready
        wanted = min(CHUNK, 1 + len(ready) // max(1, len(self._hands))) if self._message_s < QUICK_S else 1
        while ready and len(hand) < wanted:
            lane = ready.popleft()
            if lane.held.state is State.OPEN:
                lane.batch, lane.records = lane.records, []
                # One from Postgres counts as under way until what came of it is written there.
                lane.held.busy += not lane.resumed
                hand.append(lane)
        return bool(hand)

    def _take_over(self, hand: deque[Lane]) -> None:
        """Take half of the lanes that another worker has in hand and did not begin."""
        for other in self._hands:
            for _ in range((len(other) + 1) // 2):
                try:
                    hand.appendleft(other.pop())
                except IndexError:
                    break
            if hand:
                return

    def _release_due(self) -> None:
        now = clock()
        while self._delayed and self._delayed[0][0] <= now:
            lane = heapq.heappop(self._delayed)[2]
            lane.held.asleep -= 1
            lane.held.to_refill.append(lane)

    def _line_up_or_park(self, lane: Lane) -> None:
        if lane.parking is None:
            self._line_up([lane])
        else:
            lane.held.to_park.append(lane)
            self.on_parking()

    def _wake(self) -> None:
        """Wake as many idle workers as the ready line is worth."""
        if self._idle:
            # A second worker pays when there is more to do than the first one does in the time of a wake-up.
            self.changed.notify(1 + int(len(self._ready) * min(1.0, self._message_s / WORTH_S)))
        if self.on_ready is not None:
            self.on_ready()


def _nothing() -> None:
    """What is called where nobody wants to know."""
