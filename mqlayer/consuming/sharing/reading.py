"""Read one node's partitions for a member of a shared group: what is new, what is due again; and keep what it has.

One thread and one connection. The checks of the epoch travel in the same write as the read, and are answered after it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any, Final, Protocol

from mqlayer.consuming.allowance import Allowance, Pacer
from mqlayer.consuming.clock import clock
from mqlayer.consuming.node_thread import NodeThread
from mqlayer.consuming.sharing.pool import Batch, Pool
from mqlayer.consuming.sharing.spots import SharedSpots, Spot
from mqlayer.domain.message import Record, pop_command, records_of
from mqlayer.domain.tags import TagFilter
from mqlayer.failpoints import failpoint
from mqlayer.redis.nodes import NodeConnection, is_missing_script, raise_for_reply
from mqlayer.redis.outcomes import RangeWord
from mqlayer.redis.partitions import Failures, Fenced, Refused
from mqlayer.redis.rates import rate_command, rate_reply
from mqlayer.redis.sharing import (
    AT_ONCE,
    Again,
    InForce,
    Through,
    is_missing_group,
    native_group,
    shared_again_command,
    shared_again_reply,
    shared_back_command,
    shared_count_reply,
    shared_keep_command,
    shared_keep_reply,
    shared_read_command,
    shared_reclaim_command,
    shared_take_command,
    shared_take_reply,
)

log = logging.getLogger(__name__)

READ_COUNT: Final = 500
AGAIN_COUNT: Final = 100
BLOCK_MS: Final = 100
"""Longest wait in one read: a new partition waits at most this long to be seen."""
TURN_MS: Final = 10
"""The same where partitions are read in turns."""
AGAIN_S: Final = (0.05, 1.0)
AFTER_TROUBLE_S: Final = 0.2
RECLAIM_PART: Final = 3.0
"""A member looks for messages of members that are gone this often in an invisible time, and at least once a second."""


class SharedReadingOwner(Protocol):
    """What a reader asks of its member."""

    pool: Pool
    spots: SharedSpots
    allowance: Allowance
    tag_filter: TagFilter | None
    may_be_void: bool
    member_id: str
    invisible_s: float
    keep_limit_s: float

    def handled(self, batch: Batch, offsets: list[int]) -> None:
        """Count what was handled, and have it settled."""

    def batch(self, spot: Spot, records: Sequence[Record]) -> Batch:
        """Return a batch of records that were read now."""

    def left_out(self, batch: Batch, offsets: list[int]) -> None:
        """Settle messages that the group's filter leaves out, and void records."""

    def end(self, batch: Batch, offsets: list[int], word: RangeWord) -> None:
        """Have messages settled."""

    def command_read(self, spot: Spot, entry_id: bytes) -> None:
        """Settle a command record."""

    def give_back(self, batch: Batch, offsets: list[int]) -> None:
        """Have messages that nobody began given to others at once."""

    def settle_missing(self, spot: Spot, offsets: Sequence[int]) -> None:
        """Settle what is not in the stream any more."""

    def suspect(self, batch: Batch) -> None:
        """Ask Postgres about a message that was taken from a member that was not heard of, then have it handled."""

    def through(self, spot: Spot, seal_id: str) -> None:
        """Tell Postgres that everything before a command record is settled."""


class SharedReader(NodeThread):
    """The reading thread of one node."""

    def __init__(self, owner: SharedReadingOwner, line: NodeConnection, *, group_id: int, name: str) -> None:
        super().__init__(line, owner.spots.node_lost, name=name, work="reading")
        self._owner, self._group_id = owner, group_id
        self._keep_at = self._reclaim_at = 0.0
        self._at = 0
        self._pacer = Pacer(owner.allowance)

    def _loop(self) -> None:
        pool, node_id = self._owner.pool, self._line.node.node_id
        while not self._stopping.is_set():
            well = self._try_pass()
            pool.note_node(node_id, away=not well)
            if not well:
                # What was on its way may be ours, unseen.
                for spot in self._owner.spots.on(node_id):
                    spot.strays = True
                self._stopping.wait(random.uniform(*AGAIN_S))

    def _pass(self) -> None:
        now, owner = clock(), self._owner
        for batch, offsets in owner.pool.relieve():
            owner.handled(batch, offsets)
        if owner.pool.stopping:
            for batch, offsets in owner.pool.unbegun(self._is_here):
                owner.give_back(batch, offsets)
        spots = [spot for spot in owner.spots.on(self._line.node.node_id) if now >= spot.rest_until]
        if not self._take([spot for spot in spots if not spot.taken]):
            return
        taken = [spot for spot in spots if spot.taken]
        for spot in taken:
            if spot.strays:
                self._return_strays(spot)
        if now >= self._keep_at:
            self._keep_at = now + self._keep()
        if now >= self._reclaim_at:
            self._reclaim_at = now + self._reclaim(taken)
        self._read_some(taken)

    def _read_some(self, taken: list[Spot]) -> None:
        """Read what there is room for, and what may be begun; wait where that is nothing."""
        owner = self._owner
        room = owner.pool.room()
        if room > 0 and self._pacer.due():
            self._ask_rates(taken)
        room = owner.allowance.look(room)
        if taken and room > 0 and not owner.pool.stopping:
            self._read(*self._turn(taken, room), room)
        else:
            # What ends makes room, and wakes this thread; what may be begun comes with time.
            keep_s = max(0.0, self._keep_at - clock())
            self.wake.wait(min(BLOCK_MS / 1000, keep_s, owner.allowance.wait_s() or BLOCK_MS / 1000))
            self.wake.clear()

    def _ask_rates(self, spots: list[Spot]) -> None:
        """Ask the buckets of partitions for what may be begun."""
        limit, allowance = self._owner.allowance.limit, self._owner.allowance
        if limit is None or not spots:
            return
        self._pacer.asked()
        share, wanted, places = limit.share, allowance.wanted(), [spot.place for spot in spots]
        replies = self._line.call(
            [rate_command(self._line, p.prefix, p.partition, self._group_id, share, wanted=wanted) for p in places]
        )
        if not self._scripts_missing(replies):
            allowance.add(sum(rate_reply(reply, self._line.node.address).given for reply in replies))
            self._pacer.asked()

    def _is_here(self, batch: Batch) -> bool:
        return batch.place is not None and batch.assigned.node == self._line.node.node_id

    def _take(self, spots: list[Spot]) -> bool:
        if not spots:
            return True
        replies = self._line.call([shared_take_command(self._line, spot.place, afresh=True) for spot in spots])
        if self._scripts_missing(replies):
            return False
        for spot, reply in zip(spots, replies, strict=True):
            self._follow(spot, reply)
        return True

    def _turn(self, spots: list[Spot], room: int) -> tuple[list[Spot], int]:
        """Return what to read now, and for how many ms: one message of each may come, so no more than there is room."""
        if room >= len(spots):
            return spots, BLOCK_MS
        at = self._at % len(spots)
        self._at = at + room
        return (spots[at:] + spots[:at])[:room], max(TURN_MS, BLOCK_MS * room // len(spots))

    def _read(self, spots: list[Spot], longest_ms: int, room: int) -> None:
        owner = self._owner
        count = max(1, min(READ_COUNT, room // len(spots)))
        # What is in hand has to be kept meanwhile.
        keep_ms = int((self._keep_at - clock()) * 1000)
        block_ms = max(1, min([longest_ms, keep_ms, *(spot.left_ms + 1 for spot in spots if spot.left_ms >= 0)]))
        places = [spot.place for spot in spots]
        read = shared_read_command(places, owner.member_id, group_id=self._group_id, count=count, block_ms=block_ms)
        asked = clock()
        streams, *checks = self._line.call([read, *(shared_take_command(self._line, place) for place in places)])
        if is_missing_group(streams):
            log.error("shared_group_missing", extra={"address": self._line.node.address, "group": self._group_id})
            for spot in spots:
                spot.taken = False
            return
        raise_for_reply(streams, self._line.node.address)
        if self._scripts_missing(checks):
            for spot in spots:
                spot.strays = True
            return
        failpoint("shared.after_read")
        self._take_in(spots, streams, checks, asked)

    def _take_in(self, spots: list[Spot], streams: Any, checks: Sequence[Any], asked: float) -> None:
        owner = self._owner
        by_key: dict[bytes, Any] = dict(streams) if streams else {}
        wanted = owner.spots.on(self._line.node.node_id)
        for spot, reply in zip(spots, checks, strict=True):
            entries = by_key.get(spot.place.log)
            if spot not in wanted:
                # Paused, or under another epoch, since it was asked.
                self._give_back(spot, entries or [])
            elif not self._follow(spot, reply):
                spot.strays = spot.strays or bool(entries)
            elif entries:
                self._put(spot, entries, asked)
        for spot in spots:
            if spot.taken and spot.left_ms == 0 and owner.allowance.look(owner.pool.room()) > 0:
                self._again(spot)

    def _follow(self, spot: Spot, reply: Any) -> bool:
        """Take what shared_take says; say whether the epoch is in force."""
        answer = shared_take_reply(reply, self._line.node.address)
        if isinstance(answer, InForce):
            if answer.fresh:
                self._owner.spots.learn(spot, answer.committed)
            spot.taken, spot.left_ms, spot.refused = True, answer.left_ms, 0
            return True
        if isinstance(answer, Through):
            spot.left_ms = -1
            spot.rest_until = clock() + AFTER_TROUBLE_S
            self._owner.through(spot, answer.seal_id)
            return True
        spot.taken, spot.strays = False, True
        spot.rest_until = clock() + AFTER_TROUBLE_S
        if isinstance(answer, Fenced):
            self._owner.spots.fenced(spot)
        else:
            facts = {"partition": spot.place.partition, "word": answer.word, "address": self._line.node.address}
            log.error("partition_refused", extra=facts)
            self._owner.spots.refused(spot)
        return False

    def _put(self, spot: Spot, entries: list[Any], asked: float) -> None:
        command = pop_command(entries)
        if entries:
            self._hand_on(spot, records_of(entries), asked)
        if command is not None:
            self._owner.command_read(spot, command.entry_id)

    def _give_back(self, spot: Spot, entries: list[Any]) -> None:
        """Give back at once what was read and is not to be handled; refused under another epoch, which sees to it."""
        command = pop_command(entries)
        back = [(record.offset, 0, None) for record in records_of(entries)]
        if back:
            self._line.call([shared_back_command(self._line, spot.place, self._owner.member_id, back)])
        if command is not None:
            self._owner.command_read(spot, command.entry_id)

    def _hand_on(
        self, spot: Spot, records: Sequence[Record], asked: float, failures: Sequence[Failures | None] = ()
    ) -> None:
        batch = self._batch(spot, records, asked)
        batch.attempts = {
            record.offset: noted.attempts
            for record, noted in zip(records, failures, strict=False)
            if noted and noted.attempts
        }
        self._pass_over(spot, batch)
        self._owner.pool.put(batch)

    def _batch(self, spot: Spot, records: Sequence[Record], asked: float) -> Batch:
        """Return a batch of what the node gave us when it was asked then, or later."""
        batch = self._owner.batch(spot, records)
        self._owner.allowance.spend(len(records))
        batch.kept_at = asked
        self._owner.pool.add(batch)
        return batch

    def _pass_over(self, spot: Spot, batch: Batch) -> None:
        """Settle what of a batch is not to be handled."""
        owner, wanted, records = self._owner, self._owner.tag_filter, batch.records
        if spot.dead or spot.marks:
            void = [record.offset for record in records if spot.is_void(record.identity)]
            if void:
                batch.lost.update(void)
                owner.end(batch, void, "-")
                owner.allowance.spend(-len(void))
        if wanted is not None or owner.may_be_void:
            others = [
                record.offset
                for record in records
                if record.offset not in batch.lost
                and ((owner.may_be_void and record.void) or (wanted is not None and not wanted.takes(record.tags)))
            ]
            if others:
                batch.lost.update(others)
                owner.left_out(batch, others)
                owner.allowance.spend(-len(others))

    def _again(self, spot: Spot) -> None:
        room = self._owner.allowance.look(self._owner.pool.room())
        limit, asked = max(1, min(AGAIN_COUNT, room)), clock()
        (reply,) = self._line.call([shared_again_command(self._line, spot.place, self._owner.member_id, limit)])
        answer = shared_again_reply(reply, self._line.node.address)
        if not isinstance(answer, Again):
            return
        failpoint("shared.after_again")
        if answer.missing:
            self._owner.settle_missing(spot, answer.missing)
        pairs = self._unknown(spot, answer)
        usual = [(record, noted) for record, noted in pairs if noted is None or noted.started != "t"]
        if usual:
            self._hand_on(spot, [record for record, _ in usual], asked, [noted for _, noted in usual])
        for record, noted in pairs:
            if noted is not None and noted.started == "t":
                batch = self._batch(spot, [record], asked)
                batch.suspect, batch.attempts = True, {record.offset: noted.attempts} if noted.attempts else {}
                self._pass_over(spot, batch)
                if batch.open:
                    self._owner.suspect(batch)

    def _unknown(self, spot: Spot, answer: Again) -> list[tuple[Record, Failures | None]]:
        """Leave out what is in hand already: it was taken from us while nobody heard of us, and is ours again."""
        ours = {
            offset for batch in self._owner.pool.batches() if batch.place == spot.place for offset in set(batch.open)
        }
        pairs = zip(answer.records, answer.failures, strict=True)
        return [(record, noted) for record, noted in pairs if record.offset not in ours]

    def _return_strays(self, spot: Spot) -> None:
        """Give back what the node has as ours, and we do not."""
        owner, line = self._owner, self._line
        known = {o for batch in owner.pool.batches() if batch.place == spot.place for o in batch.open}
        after = b"-"
        while True:
            pending = ("XPENDING", spot.place.log, native_group(self._group_id), after, "+", AT_ONCE, owner.member_id)
            found = raise_for_reply(line.call([pending])[0], line.node.address)
            strays = [int(one[0][:-2]) for one in found if one[0].endswith(b"-0") and int(one[0][:-2]) not in known]
            if strays:
                back = shared_back_command(line, spot.place, owner.member_id, [(o, 0, None) for o in strays])
                if isinstance(shared_count_reply(line.call([back])[0], line.node.address), Fenced):
                    return
            if len(found) < AT_ONCE:
                break
            after = b"(" + found[-1][0]
        spot.strays = False

    def _keep(self) -> float:
        """Say what we still have; return after how many seconds to do so again."""
        owner, now = self._owner, clock()
        every = owner.invisible_s / 3
        hung = owner.pool.hung(owner.keep_limit_s)
        for batch in owner.pool.batches():
            place = batch.place
            if place is None or batch.assigned.node != self._line.node.node_id or now - batch.kept_at < every:
                continue
            still = batch.open
            offsets = [offset for offset in still if (id(batch), offset) not in hung]
            asked = clock()
            for at in range(0, len(offsets), AT_ONCE):
                command = shared_keep_command(self._line, place, owner.member_id, offsets[at : at + AT_ONCE])
                answer = shared_keep_reply(self._line.call([command])[0], self._line.node.address)
                if isinstance(answer, Fenced):
                    break
                batch.lost.update(answer)
                owner.pool.end(batch, answer)
            else:
                batch.kept_at, batch.hung = asked, set(still) - set(offsets)
        return every / 4

    def _reclaim(self, spots: list[Spot]) -> float:
        """Look for messages of members that are gone; return after how many seconds to do so again."""
        invisible_ms = max(1, round(self._owner.invisible_s * 1000))
        replies = self._line.call([shared_reclaim_command(self._line, spot.place, invisible_ms) for spot in spots])
        for spot, reply in zip(spots, replies, strict=True):
            if is_missing_script(reply):
                self._line.reload_scripts()
                break
            answer = shared_count_reply(reply, self._line.node.address)
            if isinstance(answer, Refused):
                spot.taken = False
            elif isinstance(answer, int) and answer:
                spot.left_ms = 0
                log.info("messages_reclaimed", extra={"partition": spot.place.partition, "count": answer})
        return random.uniform(0.5, 1.0) * min(1.0, self._owner.invisible_s / RECLAIM_PART)

    def _scripts_missing(self, replies: Sequence[Any]) -> bool:
        """Load the scripts again where the server forgot them; the pass is then done again."""
        missing = any(map(is_missing_script, replies))
        if missing:
            self._line.reload_scripts()
        return missing
