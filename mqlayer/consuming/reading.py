"""Read records from one node: take pull locks, read ahead within bounds, check the locks with every read.

One thread and one connection per node. Waiting is a blocking XREAD on all readable partitions of the node, so an append
wakes the reader at once; the lock checks travel in the same write and are answered after the read, so what was read
counts only if the lock was ours then.
"""

from __future__ import annotations

import logging
import random
from array import array
from collections.abc import Sequence
from typing import Any, Final, Protocol

from mqlayer.consuming.allowance import Allowance, Pacer
from mqlayer.consuming.clock import clock
from mqlayer.consuming.dispatch import Dispatcher
from mqlayer.consuming.holdings import Held, Lane, State
from mqlayer.consuming.node_thread import NodeThread
from mqlayer.domain.message import CommandRecord, Record, pop_command, records_of
from mqlayer.domain.offsets import Range, as_ranges, joined
from mqlayer.domain.routing import NodeId
from mqlayer.domain.tags import TagFilter
from mqlayer.failpoints import failpoint
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.looking import Selected, select_command, select_reply
from mqlayer.redis.nodes import Command, NodeConnection, is_missing_script, raise_for_reply
from mqlayer.redis.partitions import Kept, Refused, Taken, take_command, take_reply
from mqlayer.redis.rates import rate_command, rate_reply

log = logging.getLogger(__name__)

READ_COUNT: Final = 500
BLOCK_MS: Final = 100
"""Longest wait in one read: a new or released partition waits at most this long to be seen."""
LIMITED_BLOCK_MS: Final = 50
"""The same where the group's rate is limited: what it gives is fetched with the reads."""
SHORT_BLOCK_MS: Final = 10
"""The same while some partition is held back for lack of room, or a folded lane goes on."""
AGAIN_S: Final = (0.05, 1.0)


class ReadingOwner(Protocol):
    """What a reader asks of its member."""

    dispatcher: Dispatcher
    tag_filter: TagFilter | None
    archived: bool
    may_be_void: bool
    """Whether there may be void records in its topic."""
    allowance: Allowance

    def holdings_on(self, node_id: NodeId) -> list[Held]:
        """Return the holdings on a node that are not gone."""

    def may_read(self) -> bool:
        """Say whether the lease still holds."""

    def shares(self, held: Held) -> tuple[int, int]:
        """Return how many records and bytes a partition may have in hand."""

    def taken(self, pairs: Sequence[tuple[Held, Taken]]) -> None:
        """Start holdings whose pull locks are ours now."""

    def fenced(self, held: Held, reason: str) -> None:
        """Drop a holding that a later owner has."""

    def forgotten(self, held: Held) -> None:
        """Begin a holding anew whose pull lock the node does not know any more."""

    def left_out(self, count: int) -> None:
        """Count messages that the group's filter leaves out, and void records, and have the settlers send that."""

    def sealed(self) -> None:
        """Note that a command record was read."""

    def partition_refused(self, held: Held) -> None:
        """Drop a holding that its node does not have, and have the node mended."""

    def node_lost(self, node_id: NodeId) -> None:
        """Drop all holdings on a node that is not the armed run."""


class Reader(NodeThread):
    """The reading thread of one node."""

    def __init__(self, owner: ReadingOwner, line: NodeConnection, *, name: str) -> None:
        super().__init__(line, owner.node_lost, name=name, work="reading")
        self._owner = owner
        # With a filter: whether there was more than one call looks at.
        self._more = False
        self._pacer = Pacer(owner.allowance)
        # Whose turn it is where the rate does not give a message for each partition.
        self._turn = 0

    def _loop(self) -> None:
        while not self._stopping.is_set():
            if not self._try_pass():
                self._stopping.wait(random.uniform(*AGAIN_S))

    def _pass(self) -> None:
        holdings = self._owner.holdings_on(self._line.node.node_id)
        self._take([held for held in holdings if held.state is State.NEW])
        opened = [held for held in holdings if held.state is State.OPEN]
        if not self._owner.may_read():
            self._rest(BLOCK_MS)
            return
        if self._pacer.due() and self._owner.allowance.wait_s() > 0:
            self._ask_rates(opened)
        for held in opened:
            self._refill(held)
        growing = [held for held in opened if held.command is None and not held.resting]
        readable, count = self._choose(growing)
        if readable:
            wanted, block_ms = self._owner.tag_filter, self._block_ms(opened, held_back=len(readable) < len(growing))
            rates = self._rate_commands(opened) if self._pacer.due() else []
            if wanted is None:
                self._read(readable, count, block_ms, rates)
            else:
                self._select(readable, count, block_ms, wanted, rates)
        else:
            # Acks that make room wake this thread.
            self._rest(self._block_ms(opened, held_back=False))

    def _rest(self, block_ms: int) -> None:
        self.wake.wait(block_ms / 1000)
        self.wake.clear()

    def _block_ms(self, holdings: list[Held], *, held_back: bool) -> int:
        """Return how long to wait at most: not past the time when a delayed lane is due."""
        restless = held_back or any(held.folded > held.asleep for held in holdings)
        due_ms = self._owner.dispatcher.next_due_s() * 1000
        allowance = self._owner.allowance
        rate_ms = BLOCK_MS if allowance.limit is None else allowance.wait_s() * 1000 or LIMITED_BLOCK_MS
        return max(1, int(min(SHORT_BLOCK_MS if restless else BLOCK_MS, due_ms + 1, rate_ms + 1)))

    def _choose(self, holdings: list[Held]) -> tuple[list[Held], int]:
        """Return who may be read, and how many records of each."""
        rooms = [(held, held.room(*self._owner.shares(held), READ_COUNT)) for held in holdings]
        for held, room in rooms:
            self._owner.dispatcher.note_full(held, full=room == 0)
        readable = [(held, room) for held, room in rooms if room > 0]
        count = min([READ_COUNT, *(room for _, room in readable)])
        return self._within_rate([held for held, _ in readable], count)

    def _within_rate(self, readable: list[Held], count: int) -> tuple[list[Held], int]:
        """Return whose records may be begun now by the group's rate: a few of each, or of some in turn."""
        allowance = self._owner.allowance
        if allowance.limit is None or not readable:
            return readable, count
        left = 0 if allowance.wait_s() > 0 else allowance.look_to_read(count * len(readable))
        self._turn += 1
        at = self._turn % len(readable)
        # What is read beyond it is not begun, see `_read`: nobody knows before which partitions have something.
        return (readable[at:] + readable[:at] if left else []), max(1, left // len(readable))

    def _ask_rates(self, holdings: list[Held]) -> None:
        """Ask the buckets of holdings for what may be begun: in a call of its own, where no read goes along."""
        commands = self._rate_commands(holdings)
        if commands:
            self._add_rates(self._line.call(commands))

    def _rate_commands(self, holdings: list[Held]) -> list[Command]:
        limit = self._owner.allowance.limit
        if limit is None:
            return []
        self._pacer.asked()
        wanted = self._owner.allowance.wanted()
        holders = [held.holder for held in holdings]
        return [
            rate_command(self._line, h.prefix, h.partition, h.group_id, limit.share, wanted=wanted) for h in holders
        ]

    def _add_rates(self, replies: Sequence[Any]) -> None:
        if not self._scripts_missing(replies):
            address = self._line.node.address
            self._owner.allowance.add(sum(rate_reply(reply, address).given for reply in replies))
            self._pacer.asked()

    def _take(self, holdings: list[Held]) -> None:
        if not holdings:
            return
        commands = [self._take_command(held, afresh=True) for held in holdings]
        failpoint("take.before_send")
        replies = self._line.call(commands)
        failpoint("take.after_send")
        if self._scripts_missing(replies):
            return
        pairs: list[tuple[Held, Taken]] = []
        for held, reply in zip(holdings, replies, strict=True):
            answer = take_reply(reply, self._line.node.address)
            if isinstance(answer, Taken):
                pairs.append((held, answer))
            else:
                self._lost(held, answer)
        self._owner.taken(pairs)

    def _read(self, readable: list[Held], count: int, block_ms: int, rates: Sequence[Command] = ()) -> None:
        keys = [self._log(held) for held in readable]
        after = [b"%d-0" % (held.next_read - 1) for held in readable]
        read = ("XREAD", "COUNT", count, "BLOCK", block_ms, "STREAMS", *keys, *after)
        streams, *replies = self._line.call([read, *map(self._check, readable), *rates])
        locks, given = replies[: len(readable)], replies[len(readable) :]
        if self._scripts_missing(locks):
            return
        self._add_rates(given)
        raise_for_reply(streams, self._line.node.address)
        by_key: dict[bytes, Any] = dict(streams) if streams else {}
        failpoint("read.after_reply")
        if self._owner.tag_filter is not None:
            # Since this was asked for: the next pass goes by it.
            return
        for held, key, lock in zip(readable, keys, locks, strict=True):
            entries = by_key.get(key)
            if self._ours(held, lock) and entries:
                self._put(held, entries[: self._owner.allowance.look_to_read(len(entries))])

    def _select(
        self, readable: list[Held], count: int, block_ms: int, wanted: TagFilter, rates: Sequence[Command] = ()
    ) -> None:
        """Read what a filter takes. Waits only where the last look came to the end: one message wakes it there."""
        keys, after = [self._log(held) for held in readable], [held.next_read - 1 for held in readable]
        ids = [b"%d-0" % offset for offset in after]
        waits: list[Command] = [("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", *keys, *ids)]
        selects = [self._select_command(held, count, wanted) for held in readable]
        looks = [*selects, *map(self._check, readable)]
        every = self._line.call([*([] if self._more else waits), *looks, *rates])
        given, replies = every[len(every) - len(rates) :], every[: len(every) - len(rates)][-len(looks) :]
        if self._scripts_missing(replies):
            return
        self._add_rates(given)
        failpoint("select.after_reply")
        self._more = False
        if self._owner.tag_filter != wanted:
            # Another one counts since this was asked for: the next pass goes by it.
            return
        for held, reply, lock in zip(readable, replies, replies[len(readable) :], strict=False):
            selected = select_reply(reply, self._line.node.address)
            if self._ours(held, lock):
                if selected.entries and not self._owner.allowance.look_to_read(1):
                    # Others had what the rate gave: it is looked for again.
                    self._more = True
                    continue
                self._put_selected(held, selected, wanted)
                self._more = self._more or selected.more

    def _select_command(self, held: Held, count: int, wanted: TagFilter) -> Command:
        size = self._owner.shares(held)[1] - held.bytes_in_hand
        prefix, after = held.holder.prefix, held.next_read - 1
        return select_command(
            self._line, prefix, held.partition, wanted, after=after, looks=held.reach, room=count, size=size
        )

    def _put_selected(self, held: Held, selected: Selected, wanted: TagFilter) -> None:
        """Hand on what was read, but for messages that have only the hash of a tag in common with the filter."""
        command = pop_command(selected.entries)
        found = records_of(selected.entries)
        records = [record for record in found if wanted.takes(record.tags)]
        unmatched: list[Range] = selected.unmatched
        if len(records) < len(found):
            taken = {record.offset for record in records}
            others = as_ranges(record.offset for record in found if record.offset not in taken)
            unmatched = joined([*unmatched, *others])
        left_out = sum(last - first + 1 for first, last in unmatched)
        if selected.last >= held.next_read:
            missing = selected.last - held.next_read + 1 - len(records) - left_out
            if missing > 0:
                self._say_missing(held, held.next_read, selected.last, missing)
            self._note_read(held, selected.last)
            self._owner.allowance.spend(len(records))
            self._owner.dispatcher.put(held, records, last=selected.last, unmatched=unmatched)
        if left_out:
            self._owner.left_out(left_out)
        self._note_command(held, command)

    def _put(self, held: Held, entries: list[Any]) -> None:
        """Hand on what was read; a command record stays here, and nothing follows it."""
        command = pop_command(entries)
        if entries:
            records = records_of(entries)
            self._look_for_holes(held, records)
            self._note_read(held, records[-1].offset)
            self._owner.allowance.spend(len(records))
            if self._owner.may_be_void:
                self._put_but_void(held, records)
            else:
                self._owner.dispatcher.put(held, records)
        self._note_command(held, command)

    def _put_but_void(self, held: Held, records: list[Record]) -> None:
        """Hand on what was read, but for void records: these are left out as by a filter."""
        void = [record.offset for record in records if record.void]
        real = [record for record in records if not record.void] if void else records
        self._owner.dispatcher.put(held, real, last=records[-1].offset, unmatched=as_ranges(void))
        if void:
            self._owner.left_out(len(void))

    def _note_read(self, held: Held, last: int) -> None:
        """Of an archived topic, note when these were given to us."""
        if self._owner.archived:
            held.reads.note(held.next_read, last, clock())

    def _note_command(self, held: Held, command: CommandRecord | None) -> None:
        if command is not None:
            held.command = command
            self._owner.sealed()

    def _refill(self, held: Held) -> None:
        """Read again what is in front of folded lanes that are due, in half of the room: other keys want some too."""
        lanes = self._owner.dispatcher.refills(held)
        room = held.room(*self._owner.shares(held), READ_COUNT)
        budget = max(room // 2, 1 if room or held.count_in_hand <= held.folded else 0)
        try:
            while lanes and budget > 0 and held.state is State.OPEN and self._may_begin(lanes[0]):
                budget -= self._refill_lane(held, lanes[0], budget)
                del lanes[0]
        finally:
            if lanes:
                self._owner.dispatcher.not_refilled(held, lanes)

    def _may_begin(self, lane: Lane) -> bool:
        """Say whether a folded lane may go on by the group's rate: another attempt counts as a message."""
        return not _failed_before(lane) or self._owner.allowance.look_to_read(1) > 0

    def _refill_lane(self, held: Held, lane: Lane, limit: int) -> int:
        """Read again up to so many records of a lane; return how many."""
        later = lane.later or array("q")
        # What failed before may fail again, what found no room find none: what is behind it would be read for nothing.
        parking = lane.parking
        alone = later[0] in held.attempts or (parking is not None and parking.tight)
        wanted = list(later[: 1 if alone else limit])
        reads: list[Command] = [
            ("XRANGE", self._log(held), b"%d-0" % first, b"%d-0" % last) for first, last in as_ranges(wanted)
        ]
        *found, lock = self._line.call([*reads, self._check(held)])
        if is_missing_script(lock):
            self._line.reload_scripts()
            return self._refill_lane(held, lane, limit)
        entries = [entry for reply in found for entry in raise_for_reply(reply, self._line.node.address)]
        if self._ours(held, lock):
            records = records_of(entries)
            if len(records) < len(wanted):
                self._say_missing(held, wanted[0], wanted[-1], len(wanted) - len(records))
            if _failed_before(lane):
                self._owner.allowance.spend(len(records))
            self._owner.dispatcher.refill(lane, records, len(wanted))
        return len(wanted)

    def _look_for_holes(self, held: Held, records: list[Record]) -> None:
        """Offsets are dense: what is not there was removed by somebody else, and is never settled by itself."""
        first, last = records[0].offset, records[-1].offset
        missing = last - held.next_read + 1 - len(records)
        if missing > 0:
            self._say_missing(held, min(first, held.next_read), last, missing)

    def _say_missing(self, held: Held, first: int, last: int, missing: int) -> None:
        facts = {"partition": held.partition, "first": first, "last": last, "missing": missing}
        log.error("records_missing", extra=facts)

    def _ours(self, held: Held, lock: Any) -> bool:
        """Say whether the lock was ours when a read was answered; what follows if not is done."""
        answer = take_reply(lock, self._line.node.address)
        if isinstance(answer, Kept):
            return True
        if isinstance(answer, Taken):
            log.error("lock_forgotten", extra={"partition": held.partition, "address": self._line.node.address})
            self._owner.forgotten(held)
        else:
            self._lost(held, answer)
        return False

    def _lost(self, held: Held, answer: object) -> None:
        if held.state not in (State.NEW, State.OPEN):
            return
        if isinstance(answer, Refused):
            # The node lost it, though it is the armed run, or it is gone for good: re-arming sees to it.
            facts = {"partition": held.partition, "word": answer.word, "address": self._line.node.address}
            log.error("partition_refused", extra=facts)
            self._owner.partition_refused(held)
        else:
            self._owner.fenced(held, "pull")

    def _check(self, held: Held) -> Command:
        return self._take_command(held, afresh=False)

    def _take_command(self, held: Held, *, afresh: bool) -> Command:
        assigned = held.assigned
        return take_command(self._line, held.holder, start=assigned.start, seek=assigned.seek, afresh=afresh)

    def _log(self, held: Held) -> bytes:
        return partition_keys(held.holder.prefix, held.partition).log

    def _scripts_missing(self, replies: Sequence[Any]) -> bool:
        """Load the scripts again where the server forgot them; the pass is then done again."""
        missing = any(map(is_missing_script, replies))
        if missing:
            self._line.reload_scripts()
        return missing


def _failed_before(lane: Lane) -> bool:
    """Say whether the first message of a folded lane is to be tried again."""
    return lane.later is not None and len(lane.later) > 0 and lane.later[0] in lane.held.attempts
