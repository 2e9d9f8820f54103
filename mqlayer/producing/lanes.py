"""What waits and what is under way, per LP and per partition. No I/O, no clock; the ledger's lock guards all of it.

A lane is one LP of one topic. Its unsettled messages are `flying` (on the wire, in order) and behind them `waiting`;
their seqs are dense: from `acked` + 1 to `next_seq` - 1. While a lane has trouble nothing more of it is sent; the
trouble is resolved when the last answer about it has come:

    repeat   refused for now, or overtaken: send again in order
    route    its partition does not serve it: ask for a newer route, then send again in order
    lost     the node lost messages that it had acknowledged
    once     a message with a dedup id is under way; nothing may be behind it before its answer
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Literal, cast

from mqlayer.domain.names import BATCH_BYTES_LIMIT, BATCH_COUNT_LIMIT
from mqlayer.domain.routing import LP_COUNT, Route
from mqlayer.errors import PublishError
from mqlayer.producing.parcels import Parcel
from mqlayer.redis.packets import bulk, bulk_number

if TYPE_CHECKING:
    from mqlayer.producing.links import Link

Trouble = Literal["repeat", "route", "lost", "once"]


class Lane:
    """One LP of a topic: its numbering, and its messages that are not settled.

    `source` is None while a new incarnation is being registered; `Ledger.renew` brings it. Seqs up to `unsure_to` were
    sent at least once without an answer; `unsure_at` are the partitions that may hold them.
    """

    __slots__ = (
        "acked", "flying", "lost_after", "lp", "lp_bulk", "next_seq", "queued", "rerouted_seq", "reroutes", "slot",
        "source", "topic", "trouble", "unsure_at", "unsure_to", "waiting",
    )  # fmt: skip

    def __init__(self, topic: TopicLanes, lp: int, source: int | None) -> None:
        self.topic, self.lp, self.lp_bulk = topic, lp, bulk_number(lp)
        self.slot = topic.table[lp]
        self.waiting: deque[Parcel] = deque()
        self.flying: deque[Parcel] = deque()
        self.queued = False
        self.trouble: Trouble | None = None
        self.reroutes = self.rerouted_seq = 0
        self.restart(source)

    def restart(self, source: int | None) -> None:
        """Number from 1 again under another incarnation; nothing may be unsettled."""
        self.source = source
        self.next_seq = 1
        self.acked = self.unsure_to = self.lost_after = 0
        self.unsure_at: tuple[Slot, ...] = ()

    def cut_free(self) -> list[Parcel]:
        """Take out what waits, certainly is not stored, and has no dedup id: that is known in this LP only."""
        index = next((i for i, parcel in enumerate(self.waiting) if parcel.first > self.unsure_to), None)
        if index is None:
            return []
        gone = self.cut_off(index)
        for parcel in gone:
            if parcel.token:
                parcel.first = self.next_seq
                self.next_seq += parcel.count
                self.waiting.append(parcel)
        return [parcel for parcel in gone if not parcel.token]

    def put_back(self) -> None:
        """Have all that flies wait again, in front."""
        self.waiting.extendleft(reversed(self.flying))
        self.flying.clear()

    def take_back(self, source: int | None) -> None:
        """Let the number of a duplicate, the last one sent, go to the next message; or begin with a new source.

        Nothing may fly. With another source than ours everything that waits is numbered from 1 on.
        """
        if source != self.source:
            self.restart(source)
            number = 1
        else:
            number = self.acked + 1
        for parcel in self.waiting:
            parcel.first = number
            number += parcel.count
        self.next_seq = number

    def note_unsure(self) -> None:
        """Note that what flies may have been stored: no seq up to its last may ever be given to another message."""
        if not self.flying:
            return
        self.unsure_to = max(self.unsure_to, self.flying[-1].last)
        if self.slot not in self.unsure_at:
            self.unsure_at = (*self.unsure_at, self.slot)

    def first_expired(self, now: float, *, full: bool) -> int | None:
        """Return the index in `waiting` of the first parcel that certainly is not stored and whose time is over.

        `full`: its partition is at its backlog limit, for which eager ones don't wait.
        """
        for index, parcel in enumerate(self.waiting):
            if (parcel.deadline <= now or (full and parcel.eager)) and parcel.first > self.unsure_to:
                return index
        return None

    def take_out(self, parcel: Parcel) -> bool:
        """Take a waiting parcel out that certainly is not stored, and close the gap; False where it is none."""
        if parcel.first <= self.unsure_to or parcel not in self.waiting:
            return False
        index = self.waiting.index(parcel)
        behind = list(self.waiting)[index + 1 :]
        del self.waiting[index]
        # Nothing behind it was ever sent, so these numbers were nobody's as yet.
        for later in behind:
            later.first -= parcel.count
        self.next_seq -= parcel.count
        return True

    def cut_off(self, index: int) -> list[Parcel]:
        """Take all waiting parcels from an index on out, and give their seqs back."""
        gone = [self.waiting.pop() for _ in range(len(self.waiting) - index)]
        gone.reverse()
        self.next_seq = gone[0].first
        return gone


class Slot:
    """A partition as a sender sees it: the lanes that have something for it, and until when it is left alone.

    `refusal` is the error that says why, while its last answer was a refusal.
    """

    __slots__ = ("backlog_limit", "link", "listed", "partition", "ready", "refusal", "refusals", "retry_at")

    def __init__(self, partition: int, link: Link, backlog_limit: int) -> None:
        self.partition, self.link, self.backlog_limit = partition, link, backlog_limit
        self.ready: deque[Lane] = deque()
        self.listed = False
        self.retry_at = 0.0
        self.refusals = 0
        self.refusal: PublishError | None = None

    def is_avoided(self, now: float) -> bool:
        """Whether it refuses, or its node is away, and it is not time yet to try it again."""
        return (self.refusal is not None and now < self.retry_at) or self.link.is_away(now)

    def take(self) -> Batch | None:
        """Take what one append may carry: at most 500 messages and 1 MB, or one message, of one source."""
        batch = Batch(self)
        ready = self.ready
        while ready:
            lane = ready[0]
            if lane.trouble is None and lane.waiting and not batch.add(lane):
                return batch
            ready.popleft()
            lane.queued = False
        return batch if batch.parcels else None


class Batch:
    """One append: its parcels in the order of its runs, and its bytes for the wire. With `once`, all have dedup ids."""

    __slots__ = ("count", "heads", "once", "parcels", "pieces", "size", "slot", "source")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.once = False
        self.source = 0
        self.parcels: list[Parcel] = []
        self.heads: list[bytes] = []
        self.pieces: list[bytes] = []
        self.count = self.size = 0

    def add(self, lane: Lane) -> bool:
        """Let the lane's next parcels fly, as many as fit. Return whether none is left waiting."""
        source = lane.source
        if source is None or (self.source and self.source != source):
            return source is None
        waiting, flying = lane.waiting, lane.flying
        if waiting[0].token or self.once:
            return self._add_once(lane)
        first, count, size = waiting[0].first, self.count, self.size
        while waiting:
            parcel = waiting[0]
            if parcel.token:
                break
            if count and (count + parcel.count > BATCH_COUNT_LIMIT or size + parcel.size > BATCH_BYTES_LIMIT):
                break
            flying.append(waiting.popleft())
            self.parcels.append(parcel)
            self.pieces += parcel.pieces
            count += parcel.count
            size += parcel.size
        if count > self.count:
            self.source = source
            self.heads += (lane.lp_bulk, bulk_number(first), bulk_number(count - self.count))
            self.count, self.size = count, size
        return not waiting

    def _add_once(self, lane: Lane) -> bool:
        """Let one parcel with a dedup id fly. Return whether it could: then the lane waits for its answer."""
        parcel = lane.waiting[0]
        full = self.count == BATCH_COUNT_LIMIT or self.size + parcel.size > BATCH_BYTES_LIMIT
        if not parcel.token or (self.count and (full or not self.once)):
            return False
        self.once = True
        self.source = cast("int", lane.source)
        lane.flying.append(lane.waiting.popleft())
        self.parcels.append(parcel)
        self.pieces += (lane.lp_bulk, bulk_number(parcel.first), bulk(parcel.token), *parcel.pieces)
        self.count += 1
        self.size += parcel.size
        return True

    def add_fresh(self, lane: Lane, parcel: Parcel) -> bool:
        """Let a new parcel fly at once if nothing of its lane waits; return False, and do nothing, if something does.

        The short cut past `Lane.waiting` and `Slot.ready`, for a caller that sends this batch right after it.
        """
        source = lane.source
        if lane.waiting or lane.trouble is not None or source is None or (self.source and self.source != source):
            return False
        if lane.slot is not self.slot:
            if lane.flying or lane.topic.table[lane.lp] is not self.slot:
                return False
            lane.slot = self.slot
        self.source = source
        count = parcel.count
        parcel.lane = lane
        parcel.first = first = lane.next_seq
        lane.next_seq = first + count
        lane.flying.append(parcel)
        self.parcels.append(parcel)
        self.heads += (lane.lp_bulk, bulk_number(first), bulk_number(count))
        self.pieces += parcel.pieces
        self.count += count
        self.size += parcel.size
        return True

    def runs(self) -> Iterator[tuple[Lane, list[Parcel]]]:
        """Yield the runs in order: each lane with its parcels in this batch."""
        for lane, parcels in groupby(self.parcels, key=lambda parcel: parcel.lane):
            yield lane, list(parcels)

    def lanes(self) -> list[Lane]:
        """Return the lanes, each once."""
        return list(dict.fromkeys(parcel.lane for parcel in self.parcels))


class TopicLanes:
    """A topic as a producer sees it: the newest route that it knows, and the lanes that it used."""

    __slots__ = ("asked_at", "best_effort", "lanes", "name", "rerouting", "route", "stranded", "table")

    def __init__(self, route: Route, table: list[Slot], asked_at: float) -> None:
        self.name = route.topic
        self.lanes: list[Lane | None] = [None] * LP_COUNT
        self.stranded: dict[Lane, None] = {}
        self.rerouting = False
        self.adopt(route, table, asked_at)

    def adopt(self, route: Route, table: list[Slot], asked_at: float) -> None:
        """Use a route from now on; lanes follow when nothing of them flies."""
        self.route, self.table, self.asked_at = route, table, asked_at
        self.best_effort = route.best_effort

    def lane(self, lp: int, source: int | None) -> Lane:
        """Return the lane of an LP, made at its first use."""
        lane = self.lanes[lp]
        if lane is None:
            lane = self.lanes[lp] = Lane(self, lp, source)
        return lane
