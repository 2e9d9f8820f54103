"""What a producer knows of its messages, and what answers mean for them. No I/O.

Everything here is guarded by `lock`. Methods return the listeners to be told; `tell_all` does so without the lock.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final, Protocol

from mqlayer.domain.dedup import FirstPlace
from mqlayer.domain.routing import Lp
from mqlayer.errors import (
    AcknowledgedLoss,
    BacklogFull,
    Loss,
    MqlayerError,
    NotReplicated,
    ProducerClosed,
    ProducerFull,
    PublishAborted,
    PublishError,
)
from mqlayer.producing.lanes import Batch, Lane, Slot, TopicLanes, Trouble
from mqlayer.producing.losses import Claim, FormerSources, LossNews
from mqlayer.producing.parcels import NOTHING, Found, Listener, Oneway, Original, Outcome, Parcel, Place
from mqlayer.producing.pauses import pause_s
from mqlayer.redis.partitions import OnceOutcome, RunOutcome

if TYPE_CHECKING:
    from mqlayer.producing.links import Link

log = logging.getLogger(__name__)

MAX_UNTOLD: Final = 100_000
MAX_FORMER: Final = 100_000
"""How many sources that lanes left are looked after: some 20 MB, a hundred losses of a topic in all its LPs."""
CLOSED: Final = "it was closed before an answer came, so the message may or may not be stored"


@dataclass(frozen=True, slots=True)
class ProducerStats:
    """Counts of messages since the producer started; `pending` ones are not settled yet."""

    stored: int
    """Have a place in a partition."""
    repeated: int
    """Of those: an earlier try, whose answer was lost, had stored them."""
    failed: int
    """Certainly not stored: refused until their time was over."""
    aborted: int
    """Not sent, because an earlier message of their LP failed."""
    withdrawn: int
    """Not sent, because their futures were cancelled."""
    lost: int
    """Were acknowledged, and a node lost them."""
    duplicates: int
    """Were not stored, because one with their dedup id was."""
    diverted: int
    """Went to another partition than their key's, in topics of the strategy best_effort; twice, if that one refused."""
    unreplicated: int
    """Are stored, but fewer replicas than required received them in time."""
    lines_lost: int
    """How often a connection broke, was refused or answered with an error."""
    pending: int
    pending_bytes: int


class Errands(Protocol):
    """What a ledger needs done elsewhere; called under the lock, so it must only be noted then."""

    def reroute(self, topic: TopicLanes) -> None:
        """Get a newer route and release the topic's stranded lanes."""

    def look_again(self, topic: TopicLanes) -> None:
        """Read a topic's limits again, unless that was done just now."""

    def renew(self) -> None:
        """Register a new incarnation."""

    def search(self, parcel: Parcel, early: int, place: Place, offset: int) -> None:
        """Find the first `early` messages of a parcel, stored by an earlier try; the others are at the place."""


class Ledger:
    """The lanes, slots and bounds of one producer.

    `errands` must be set before the first answer comes.
    """

    errands: Errands

    def __init__(
        self,
        *,
        source: int,
        max_count: int,
        max_bytes: int,
        require_replicas: int,
        chance: random.Random | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.source: int | None = source
        self.topics: dict[str, TopicLanes] = {}
        self.slots: dict[int, Slot] = {}
        self.searched: dict[Parcel, Place] = {}
        self.pending_count = self.pending_bytes = 0
        self.counts: Counter[str] = Counter()
        self.closed_because = ""
        self._max_count, self._max_bytes = max_count, max_bytes
        self._require_replicas = require_replicas
        self._watchers = 0
        self._chance = chance or random.Random()
        # What nobody was told of: who publishes next hears it.
        self.untold: deque[Loss] = deque(maxlen=MAX_UNTOLD)
        self._former = FormerSources(MAX_FORMER)
        # The lanes with trouble: mostly none, so that no answer is looked through for them.
        self._troubled: set[Lane] = set()

    # Taking messages in

    def has_room(self, count: int, size: int) -> bool:
        """Say whether so much may be added; one parcel always may."""
        return not self.pending_count or (
            self.pending_count + count <= self._max_count and self.pending_bytes + size <= self._max_bytes
        )

    def wait_for_room(self, count: int, size: int, until: float) -> None:
        """Return when so much may be added; call with the lock held. Raises ProducerFull or ProducerClosed."""
        started = time.monotonic()
        while not self.closed_because and not self.has_room(count, size):
            wait_s = until - time.monotonic()
            if wait_s <= 0 or is_telling():
                raise ProducerFull(self.pending_count, self.pending_bytes, time.monotonic() - started)
            self.wait_for_change(wait_s)
        if self.closed_because:
            raise ProducerClosed(self.closed_because)

    def wait_for_change(self, timeout_s: float) -> None:
        """Wait until something is settled, or for the time; call with the lock held."""
        self._watchers += 1
        try:
            self.changed.wait(timeout_s)
        finally:
            self._watchers -= 1

    def add(self, topic: TopicLanes, lp: int, parcel: Parcel) -> Lane:
        """Give a parcel its seqs and queue it."""
        lane = topic.lanes[lp] or topic.lane(lp, self.source)
        parcel.lane = lane
        parcel.first = lane.next_seq
        lane.next_seq += parcel.count
        lane.waiting.append(parcel)
        self.pending_count += parcel.count
        self.pending_bytes += parcel.size
        if not lane.queued:
            self.queue(lane)
        if topic.best_effort:
            self._avoid(lane, time.monotonic())
        return lane

    def launch(self, topic: TopicLanes, parcels: Mapping[Lp, Parcel], slot: Slot) -> Batch | None:
        """Give parcels their seqs; return a batch of those that may be sent at once, and queue the others.

        The caller holds the slot's link and has to send the batch before anything else.
        """
        batch = Batch(slot)
        lanes, add_fresh = topic.lanes, batch.add_fresh
        for lp, parcel in parcels.items():
            if slot.refusal is not None or not add_fresh(lanes[lp] or topic.lane(lp, self.source), parcel):
                self.add(topic, lp, parcel)
        self.pending_count += batch.count
        self.pending_bytes += batch.size
        return batch if batch.parcels else None

    def queue(self, lane: Lane) -> None:
        """Have what waits in a lane sent, unless something holds it up."""
        if lane.queued or lane.trouble is not None or not lane.waiting or lane.source is None:
            return
        # Answers about what flies decide about what is behind it, so both must go the same way.
        if not lane.flying:
            lane.slot = lane.topic.table[lane.lp]
        slot = lane.slot
        slot.ready.append(lane)
        lane.queued = True
        if not slot.listed:
            slot.listed = True
            slot.link.slots.append(slot)

    # What answers mean

    def stored(self, batch: Batch, offset: int, replicas: int | None) -> list[Listener]:
        """Every message of a batch was appended, the first one at `offset`."""
        outcome = self._outcome_of(batch, replicas)
        told: list[Listener] = []
        if not isinstance(outcome, Place) or (self._troubled and self._has_trouble(batch)):
            for parcel in batch.parcels:
                told += self._stored_parcel(parcel, offset, 0, outcome, replicas, batch.slot)
                offset += parcel.count
            self._clear_refusal(batch.slot)
            return told
        # The common case, written out: it runs for every message.
        for parcel in batch.parcels:
            lane = parcel.lane
            count = parcel.count
            lane.flying.popleft()
            lane.acked = parcel.first + count - 1
            parcel.offset = offset
            parcel.outcome = outcome
            parcel.pieces = NOTHING
            offset += count
            listener = parcel.listener
            if listener is not None:
                listener.left -= count
                if not listener.left:
                    told.append(listener)
        self.counts["stored"] += batch.count
        self._leave(batch.count, batch.size)
        self._clear_refusal(batch.slot)
        return told

    def mixed(self, batch: Batch, offset: int, outcomes: Sequence[RunOutcome], replicas: int | None) -> list[Listener]:
        """The runs of a batch fared differently."""
        place = self._outcome_of(batch, replicas)
        told: list[Listener] = []
        for (lane, parcels), (word, appended, mark) in zip(batch.runs(), outcomes, strict=True):
            if word in ("ok", "dup"):
                early = sum(parcel.count for parcel in parcels) - appended
                for parcel in parcels:
                    told += self._stored_parcel(parcel, offset, min(early, parcel.count), place, replicas, batch.slot)
                    offset += max(0, parcel.count - early)
                    early = max(0, early - parcel.count)
            else:
                self._not_taken(lane, word, mark)
        self._clear_refusal(batch.slot)
        return told

    def bar(self, batch: Batch) -> None:
        """Send nothing behind the messages of a batch, which have dedup ids, before its answer has come."""
        for parcel in batch.parcels:
            self._note_trouble(parcel.lane, "once")

    def each(self, batch: Batch, outcomes: Sequence[OnceOutcome], replicas: int | None) -> list[Listener]:
        """The messages of a batch, all with dedup ids, fared differently."""
        place = self._outcome_of(batch, replicas)
        told: list[Listener] = []
        for parcel, (word, offset, first, mark) in zip(batch.parcels, outcomes, strict=True):
            if word == "ok":
                told += self._stored_parcel(parcel, offset, 0, place, replicas, batch.slot)
            elif word == "dup":
                told += self._stored_before(parcel, first, place, replicas, batch.slot)
            elif word == "same" and first is not None:
                told += self._duplicate(parcel, first, place, replicas, batch.slot)
            else:
                self._not_taken(parcel.lane, word, mark)
        self._clear_refusal(batch.slot)
        return told

    def refused(self, batch: Batch, error: PublishError, now: float) -> list[Listener]:
        """Nothing of a batch was stored, and nothing can be for a while."""
        slot = batch.slot
        slot.refusals += 1
        slot.refusal = error
        slot.retry_at = now + pause_s(slot.refusals)
        if slot.refusals == 1:
            log.warning("publish_refused", extra={"partition": slot.partition, "reason": str(error)})
        self.repeat(batch)
        told: list[Listener] = []
        if isinstance(error, BacklogFull):
            # It may have been raised since.
            for topic in {lane.topic for lane in batch.lanes()}:
                self.errands.look_again(topic)
        self.avoid([slot], now)
        for lane in list(slot.ready):
            told += self.expire(lane, now)
        return told

    def repeat(self, batch: Batch) -> None:
        """Nothing of a batch was stored; it is to be sent again."""
        for lane in batch.lanes():
            self._hold_up(lane, "repeat")

    def misrouted(self, batch: Batch) -> None:
        """Nothing of a batch was stored: its partition is not open on this node."""
        for lane in batch.lanes():
            self._hold_up(lane, "route")

    def unknown(self, batches: Iterable[Batch]) -> None:
        """Nobody knows what became of these batches, all that flew on one line: they are to be sent again."""
        for lane in dict.fromkeys(lane for batch in batches for lane in batch.lanes()):
            lane.note_unsure()
            self._hold_up(lane, "repeat")

    def resolve(self, lanes: Iterable[Lane], now: float) -> list[Listener]:
        """Act on the trouble of lanes about which no more answers will come."""
        told: list[Listener] = []
        for lane in lanes:
            trouble = lane.trouble
            if trouble is None:
                continue
            lane.put_back()
            if trouble == "lost":
                told += self._lose(lane)
            elif not lane.waiting:
                # What was refused turned out to be stored.
                self._forget_trouble(lane)
            elif trouble == "route":
                self._strand(lane)
            else:
                self._forget_trouble(lane)
                self._avoid(lane, now)
                told += self.expire(lane, now)
                self.queue(lane)
        return told

    def found(self, parcel: Parcel, outcome: Found | MqlayerError) -> list[Listener]:
        """A parcel of which an earlier try had stored messages: where they are."""
        if parcel not in self.searched:
            return []
        del self.searched[parcel]
        return self._finish(parcel, outcome)

    # What nodes lost

    def claims(self, link: Link) -> list[Claim]:
        """Return what partitions on a node have to hold: where each LP is sent, and where it was sent last.

        Under the source that a lane has now, and under those that it left.
        """
        present = ((lane, lane.source, lane.acked) for lane in self._lanes() if lane.acked and lane.source is not None)
        return [
            Claim(lane, source, acked, slot.partition)
            for lane, source, acked in chain(self._former, present)
            for slot in dict.fromkeys((lane.slot, lane.topic.table[lane.lp]))
            if slot.link is link
        ]

    def missed(self, claim: Claim, mark: int) -> list[Listener]:
        """Act on a mark that was read, after the claim was made, from the run of the node that is armed.

        What is behind lost messages can't be stored any more: the chain refuses it.
        """
        lane = claim.lane
        if mark >= claim.acked:
            return []
        if lane.source != claim.source:
            return self._lose_former(claim, mark)
        self._note_lost(lane, mark)
        # Of what flies answers come, and more of it may be lost with them.
        return [] if lane.flying else self.resolve([lane], 0.0)

    def hear(self) -> None:
        """Raise AcknowledgedLoss with all that was lost and that nobody was told of as yet; call without the lock."""
        with self.lock:
            losses = tuple(self.untold)
            self.untold.clear()
        if losses:
            raise AcknowledgedLoss(*losses[0], losses[1:])

    # Best effort

    def avoid(self, slots: Iterable[Slot], now: float) -> None:
        """Have what waits for partitions that don't take it go elsewhere, where its topic says that it may."""
        for slot in slots:
            for lane in list(slot.ready):
                self._avoid(lane, now)

    def _avoid(self, lane: Lane, now: float) -> None:
        """Send what certainly is not stored to another partition, marked; nothing, where order counts or none is free.

        What may be stored stays: sent elsewhere too, it might be there twice.
        """
        topic = lane.topic
        if not topic.best_effort or not lane.waiting or not lane.slot.is_avoided(now):
            return
        free = [slot for slot in dict.fromkeys(topic.table) if not slot.is_avoided(now)]
        moved = lane.cut_free() if free else []
        for parcel in moved:
            self.pending_bytes += parcel.mark_reordered()
            slot = self._chance.choice(free)
            lp = self._chance.choice([lp for lp, other in enumerate(topic.table) if other is slot])
            other = topic.lanes[lp] or topic.lane(lp, self.source)
            parcel.lane, parcel.first = other, other.next_seq
            other.next_seq += parcel.count
            other.waiting.append(parcel)
            self.queue(other)
            other.slot.link.wake_locked()
            self.counts["diverted"] += parcel.count

    # Failures

    def expire(self, lane: Lane, now: float) -> list[Listener]:
        """Fail what waits in a lane of a refusing partition and whose time is over."""
        refusal = lane.slot.refusal
        index = lane.first_expired(now, full=isinstance(refusal, BacklogFull)) if refusal is not None else None
        if refusal is None or index is None:
            return []
        return self._fail(lane, index, refusal)

    def refuse_eager(self, parcel: Parcel, now: float) -> list[Listener]:
        """Fail a parcel that was just queued, if it does not wait for a partition that was at its limit just now."""
        slot = parcel.lane.slot
        if not parcel.eager or now >= slot.retry_at or not isinstance(slot.refusal, BacklogFull):
            return []
        return self.expire(parcel.lane, now)

    def withdraw(self, parcel: Parcel) -> bool:
        """Take a parcel back whose partition refuses it and that certainly is not stored; say whether it was.

        What is behind it goes on. Where nothing refuses it, it is as good as sent.
        """
        with self.lock:
            lane = parcel.lane
            if parcel.outcome is not None or lane.slot.refusal is None or not lane.take_out(parcel):
                return False
            self.counts["withdrawn"] += parcel.count
            parcel.listener = None
            self._finish(parcel, PublishAborted(lane.topic.name, lane.lp, "it was withdrawn"))
            return True

    def give_up(self, parcel: Parcel, now: float) -> list[Listener]:
        """Fail a parcel whose time is over, if it certainly is not stored and its partition refuses; else nothing."""
        parcel.deadline = min(parcel.deadline, now)
        lane = parcel.lane
        refusal = lane.slot.refusal
        if parcel.outcome is None and refusal is not None and parcel.first > lane.unsure_to and parcel in lane.waiting:
            return self._fail(lane, lane.waiting.index(parcel), refusal)
        return []

    def fail_certain(self, slots: Iterable[Slot], error: MqlayerError) -> list[Listener]:
        """Fail everything that waits for these partitions and certainly is not stored."""
        told: list[Listener] = []
        for slot in slots:
            for lane in list(slot.ready):
                index = next((i for i, p in enumerate(lane.waiting) if p.first > lane.unsure_to), None)
                if index is not None and lane.trouble is None:
                    told += self._fail(lane, index, error)
        return told

    def fail_rest(self) -> list[Listener]:
        """Give up everything that is left, when the producer closes."""
        told: list[Listener] = []
        for lane in self._lanes():
            lane.put_back()
            while lane.waiting:
                told += self._finish(lane.waiting.popleft(), ProducerClosed(CLOSED))
        for parcel, place in list(self.searched.items()):
            told += self.found(parcel, Found(place.source, place.replicas, ((place.partition, None),) * parcel.count))
        return told

    # New incarnations and routes

    def renew(self, source: int) -> None:
        """Go on under a new incarnation in the lanes that have none."""
        self.source = source
        for lane in self._lanes():
            if lane.source is None:
                lane.source = source
                self.queue(lane)

    def release(self, topic: TopicLanes) -> None:
        """Send again what waited for a newer route."""
        stranded, topic.stranded = list(topic.stranded), {}
        for lane in stranded:
            self._forget_trouble(lane)
            self.queue(lane)

    def stats(self) -> ProducerStats:
        """Return the counts so far."""
        return ProducerStats(
            **{name: self.counts[name] for name in COUNTED},
            pending=self.pending_count,
            pending_bytes=self.pending_bytes,
        )

    def _lanes(self) -> Iterator[Lane]:
        for topic in self.topics.values():
            yield from filter(None, topic.lanes)

    def _stored_parcel(
        self,
        parcel: Parcel,
        offset: int,
        early: int,
        outcome: Place | MqlayerError,
        replicas: int | None,
        slot: Slot,
    ) -> list[Listener]:
        """Settle a parcel of which the first `early` messages were there before."""
        lane = parcel.lane
        told = self._land(parcel, outcome, replicas, slot)
        lane.acked = parcel.last
        self.counts["stored"] += parcel.count
        self.counts["repeated"] += early
        if early and lane.source is not None:
            place = Place(slot.partition, lane.source, replicas)
            self.searched[parcel] = place
            self.errands.search(parcel, early, place, offset)
            return told
        if not isinstance(outcome, Place):
            self.counts["unreplicated"] += parcel.count
        parcel.offset = offset
        return told + self._finish(parcel, outcome)

    def _stored_before(
        self,
        parcel: Parcel,
        first: FirstPlace | None,
        outcome: Place | MqlayerError,
        replicas: int | None,
        slot: Slot,
    ) -> list[Listener]:
        """Settle a message that an earlier try had stored: where it is, its dedup id tells, if that is known."""
        lane = parcel.lane
        if first is None or first.identity != (lane.source, lane.lp, parcel.first):
            return self._stored_parcel(parcel, 0, 1, outcome, replicas, slot)
        told = self._land(parcel, outcome, replicas, slot)
        lane.acked = parcel.last
        self.counts["stored"] += 1
        self.counts["repeated"] += 1
        where = (slot.partition if first.partition is None else first.partition, first.offset)
        return told + self._finish(parcel, Found(first.identity.source, replicas, (where,)))

    def _duplicate(
        self, parcel: Parcel, first: FirstPlace, outcome: Place | MqlayerError, replicas: int | None, slot: Slot
    ) -> list[Listener]:
        """Settle a message whose dedup id another message had: nothing was stored, and its number is free again.

        Unless a try of it had no answer: that one may be worked off at any later time, when the id is forgotten, and
        would then take the number that the next message was given. So the lane goes on under a new incarnation.
        """
        lane = parcel.lane
        told = self._land(parcel, outcome, replicas, slot)
        if parcel.first > lane.unsure_to:
            lane.take_back(lane.source)
        else:
            self._former.add(lane, lane.acked)
            if lane.source == self.source:
                self.source = None
                self.errands.renew()
            lane.take_back(self.source)
        self.counts["duplicates"] += 1
        partition = slot.partition if first.partition is None else first.partition
        original = Original(partition, first.offset, first.identity, replicas)
        return told + self._finish(parcel, original if isinstance(outcome, Place) else outcome)

    def _land(self, parcel: Parcel, outcome: Place | MqlayerError, replicas: int | None, slot: Slot) -> list[Listener]:
        """Take a parcel from what flies, and settle what flew in front of it."""
        lane = parcel.lane
        told: list[Listener] = []
        while lane.flying[0] is not parcel:
            # It was refused in this try. The chain accepted what is behind it, so an earlier try had stored it.
            ahead = lane.flying[0]
            told += self._stored_parcel(ahead, 0, ahead.count, outcome, replicas, slot)
        lane.flying.popleft()
        return told

    def _not_taken(self, lane: Lane, word: str, mark: int) -> None:
        """Nothing of a run was stored."""
        if word == "unowned":
            self._hold_up(lane, "route")
        elif mark < lane.acked:
            self._note_lost(lane, mark)
        else:
            # Overtaken: something before it was refused.
            self._hold_up(lane, "repeat")

    def _hold_up(self, lane: Lane, trouble: Trouble) -> None:
        """Note a trouble where nothing but a message with a dedup id holds the lane up."""
        if lane.trouble in (None, "once"):
            self._note_trouble(lane, trouble)

    def _note_trouble(self, lane: Lane, trouble: Trouble) -> None:
        lane.trouble = trouble
        self._troubled.add(lane)

    def _note_lost(self, lane: Lane, mark: int) -> None:
        """Note that what is behind a mark is gone; of the marks of two partitions the lower one counts."""
        lane.lost_after = min(mark, lane.lost_after) if lane.trouble == "lost" else mark
        self._note_trouble(lane, "lost")

    def _forget_trouble(self, lane: Lane) -> None:
        lane.trouble = None
        self._troubled.discard(lane)

    def _has_trouble(self, batch: Batch) -> bool:
        return not self._troubled.isdisjoint(parcel.lane for parcel in batch.parcels)

    def _outcome_of(self, batch: Batch, replicas: int | None) -> Place | MqlayerError:
        if replicas is not None and replicas < self._require_replicas:
            slot = batch.slot
            name = batch.parcels[0].lane.topic.name
            return NotReplicated(name, slot.partition, self._require_replicas, replicas)
        return Place(batch.slot.partition, batch.source, replicas)

    def _clear_refusal(self, slot: Slot) -> None:
        if slot.refusal is not None:
            slot.refusals, slot.refusal = 0, None

    def _strand(self, lane: Lane) -> None:
        head = lane.waiting[0].first
        lane.reroutes = lane.reroutes + 1 if lane.rerouted_seq == head else 1
        lane.rerouted_seq = head
        topic = lane.topic
        topic.stranded[lane] = None
        if not topic.rerouting:
            topic.rerouting = True
            self.errands.reroute(topic)

    def _lose(self, lane: Lane) -> list[Listener]:
        """Fail what waits, and go on under a new incarnation.

        The lost seqs must not be given to other messages: groups may have handled the lost ones, and would take the
        new ones for repetitions of them.
        """
        link = lane.slot.link
        loss = Loss(lane.topic.name, lane.lp, lane.lost_after + 1, lane.acked, lane.source or 0, *link.runs)
        error = AcknowledgedLoss(*loss)
        told = self._count_loss(loss, lane.slot.partition)
        if not lane.waiting or isinstance(lane.waiting[0].listener, Oneway):
            self.untold.append(loss)
        if lane.waiting:
            told += self._fail(lane, 0, error)
        if lane.source == self.source:
            self.source = None
            self.errands.renew()
        self._forget_trouble(lane)
        self._former.add(lane, lane.lost_after)
        lane.restart(self.source)
        return told

    def _lose_former(self, claim: Claim, mark: int) -> list[Listener]:
        """Tell of what is missing of a source that a lane left: nothing waits under it, so the lane goes on."""
        lane = claim.lane
        last = self._former.lower(lane, claim.source, mark)
        if mark >= last:
            return []
        loss = Loss(lane.topic.name, lane.lp, mark + 1, last, claim.source, *self.slots[claim.partition].link.runs)
        self.untold.append(loss)
        return self._count_loss(loss, claim.partition)

    def _count_loss(self, loss: Loss, partition: int) -> list[Listener]:
        facts = {"topic": loss.topic, "lp": loss.lp, "reason": str(AcknowledgedLoss(*loss))}
        log.error("acknowledged_messages_lost", extra=facts)
        self.counts["lost"] += loss.messages
        return [LossNews(loss, partition)]

    def _fail(self, lane: Lane, index: int, error: MqlayerError) -> list[Listener]:
        first, *behind = lane.cut_off(index)
        self.counts["failed"] += first.count
        told = self._finish(first, _copy(error))
        for parcel in behind:
            self.counts["aborted"] += parcel.count
            told += self._finish(parcel, PublishAborted(lane.topic.name, lane.lp, str(error)))
        return told

    def _finish(self, parcel: Parcel, outcome: Outcome | MqlayerError) -> list[Listener]:
        parcel.outcome = outcome
        parcel.pieces = NOTHING
        self._leave(parcel.count, parcel.size)
        listener = parcel.listener
        if listener is None:
            return []
        if isinstance(outcome, MqlayerError):
            listener.failed(parcel)
        listener.left -= parcel.count
        return [] if listener.left else [listener]

    def _leave(self, count: int, size: int) -> None:
        self.pending_count -= count
        self.pending_bytes -= size
        if self._watchers:
            self.changed.notify_all()


COUNTED: Final = (
    "stored",
    "repeated",
    "failed",
    "aborted",
    "withdrawn",
    "lost",
    "duplicates",
    "diverted",
    "unreplicated",
    "lines_lost",
)


class _Telling(threading.local):
    """Whether this thread runs the application's callbacks."""

    now = False


_telling = _Telling()


def tell_all(listeners: Sequence[Listener]) -> None:
    """Tell listeners; not under the lock, because it runs the application's callbacks."""
    if not listeners:
        return
    before, _telling.now = _telling.now, True
    try:
        for listener in listeners:
            listener.tell()
    finally:
        _telling.now = before


def is_telling() -> bool:
    """Say whether this is called by a future's callback: it must not wait then, others wait for this very thread."""
    return _telling.now


def _copy(error: MqlayerError) -> MqlayerError:
    """Return an error of its own: two threads must not raise one object."""
    return type(error)(*error.args)
