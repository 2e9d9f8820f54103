"""Tell one node what became of messages of a shared group: settled, or to be given again after a wait.

One thread and one connection. What can't be told now is told later; under another epoch it is void, and comes again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from mqlayer.consuming.clock import clock
from mqlayer.consuming.node_thread import NodeThread
from mqlayer.consuming.sharing.pool import Batch, Pool
from mqlayer.consuming.sharing.spots import SharedSpots
from mqlayer.domain.offsets import Range, as_ranges
from mqlayer.failpoints import failpoint
from mqlayer.redis.nodes import Command, NodeConnection, is_missing_script
from mqlayer.redis.outcomes import RangeWord, told_of
from mqlayer.redis.partitions import Fenced, Refused, count_command
from mqlayer.redis.sharing import (
    AT_ONCE,
    SETTLE_LIMIT,
    SharedPlace,
    SharedSettled,
    shared_back_command,
    shared_begin_command,
    shared_begin_reply,
    shared_count_reply,
    shared_settle_command,
    shared_settle_reply,
)

IDLE_WAIT_S: Final = 0.25
LINGER_S: Final = 0.001
"""What comes in meanwhile goes with the same call."""
AGAIN_S: Final = 0.1
RANGES: Final = 500


class SharedSettlingOwner(Protocol):
    """What a settler asks of its member."""

    pool: Pool
    spots: SharedSpots
    member_id: str
    archived: bool

    def settled(self, count: int) -> None:
        """Count what the server has settled, and let more be read."""


class Ended(NamedTuple):
    """Messages of a batch that are over for the group; the word says what is told of them."""

    batch: Batch
    offsets: Sequence[int]
    word: RangeWord


class Back(NamedTuple):
    """A message that is to be given again; `failed`: its attempts by now, None: as noted."""

    batch: Batch
    offset: int
    ms: int
    failed: int | None


@dataclass(slots=True)
class Begin:
    """A worker waits for an attempt to be counted; `attempts` is None where the message is not ours."""

    batch: Batch
    offset: int
    attempts: int | None = None
    noted: threading.Event = field(default_factory=threading.Event)


class _Call(NamedTuple):
    command: Command
    place: SharedPlace
    ends: Sequence[tuple[Batch, Sequence[int]]]
    begin: Begin | None
    item: Any


class SharedSettler(NodeThread):
    """The settling thread of one node. Stopping it sends what is there."""

    def __init__(self, owner: SharedSettlingOwner, line: NodeConnection, *, name: str) -> None:
        super().__init__(line, owner.spots.node_lost, name=name, work="settling")
        self._owner = owner
        # Appended to by all threads, taken out by this one.
        self.ended: deque[Ended] = deque()
        self.back: deque[Back] = deque()
        self.begins: deque[Begin] = deque()
        self.commands: deque[tuple[SharedPlace, bytes]] = deque()

    def _loop(self) -> None:
        while not self._stopping.is_set():
            self.wake.wait(IDLE_WAIT_S)
            if not self.begins:
                self._stopping.wait(LINGER_S)
            self.wake.clear()
            if not self._try_pass():
                self._stopping.wait(AGAIN_S)
        self._try_pass()

    def _pass(self) -> None:
        ended, back = _all_of(self.ended), _all_of(self.back)
        begins, commands = _all_of(self.begins), _all_of(self.commands)
        if not (ended or back or begins or commands):
            return
        try:
            calls = [*self._begin_calls(begins), *self._settle_calls(ended, commands), *self._back_calls(back)]
            failpoint("shared.before_settle")
            replies = self._line.call([call.command for call in calls])
            if any(map(is_missing_script, replies)):
                self._line.reload_scripts()
                # Each of them may be said twice.
                replies = self._line.call([call.command for call in calls])
            failpoint("shared.after_settle")
            for call, reply in zip(calls, replies, strict=True):
                self._follow(call, reply)
        except BaseException:
            self.ended.extendleft(reversed(ended))
            self.back.extendleft(reversed(back))
            self.commands.extendleft(reversed(commands))
            for begin in begins:
                begin.noted.set()
            raise

    def _follow(self, call: _Call, reply: Any) -> None:
        """Take what a call answered. What is refused is void: it comes again under the epoch in force."""
        address = self._line.node.address
        if call.begin is not None:
            call.begin.attempts = shared_begin_reply(reply, address)
            call.begin.noted.set()
            return
        settling = call.item == "settle"
        answer = shared_settle_reply(reply, address) if settling else shared_count_reply(reply, address)
        if isinstance(answer, Fenced | Refused):
            if isinstance(answer, Refused) and answer.word == "unknown":
                # An append ended in its middle: what was read of it is counted, and comes again.
                self._line.call([count_command(self._line, call.place.prefix, call.place.partition)])
            self._owner.spots.void(call.place)
            return
        for batch, offsets in call.ends:
            self._owner.pool.end(batch, offsets)
        self._owner.settled(answer.fresh if isinstance(answer, SharedSettled) else 0)

    def _begin_calls(self, begins: Iterable[Begin]) -> list[_Call]:
        line, member = self._line, self._owner.member_id
        return [
            _Call(shared_begin_command(line, place, member, begin.offset), place, (), begin, "begin")
            for begin in begins
            for place in [begin.batch.place]
            if place is not None
        ]

    def _settle_calls(self, ended: Sequence[Ended], commands: Iterable[tuple[SharedPlace, bytes]]) -> list[_Call]:
        line, owner = self._line, self._owner
        calls = [
            _Call(shared_settle_command(line, place, owner.member_id, (), command=entry), place, (), None, "settle")
            for place, entry in commands
        ]
        if owner.archived:
            for one in ended:
                calls += self._told_calls(one)
            return calls
        by_place: dict[SharedPlace, list[Ended]] = {}
        for one in ended:
            if one.batch.place is not None:
                by_place.setdefault(one.batch.place, []).append(one)
        for place, of_place in by_place.items():
            ends = [(one.batch, one.offsets) for one in of_place]
            ranges = as_ranges(offset for _, offsets in ends for offset in offsets)
            pieces = pieces_of(ranges)
            for number, piece in enumerate(pieces):
                command = shared_settle_command(line, place, owner.member_id, piece)
                # The last one of a place that is answered answers for all: a refusal refuses each.
                calls.append(_Call(command, place, ends if number == len(pieces) - 1 else (), None, "settle"))
        return calls

    def _told_calls(self, one: Ended) -> list[_Call]:
        """Of an archived topic each batch by itself: its messages were given at one time."""
        place = one.batch.place
        if place is None:
            return []
        age_ms = max(0, round((clock() - one.batch.read_at) * 1000))
        calls: list[_Call] = []
        pieces = pieces_of(as_ranges(one.offsets))
        for number, piece in enumerate(pieces):
            told = told_of(one.word * len(piece), [(piece[-1][1], age_ms)])
            command = shared_settle_command(self._line, place, self._owner.member_id, piece, told=told)
            ends = ((one.batch, one.offsets),) if number == len(pieces) - 1 else ()
            calls.append(_Call(command, place, ends, None, "settle"))
        return calls

    def _back_calls(self, back: Iterable[Back]) -> list[_Call]:
        by_place: dict[SharedPlace, list[Back]] = {}
        for one in back:
            if one.batch.place is not None:
                by_place.setdefault(one.batch.place, []).append(one)
        calls = []
        for place, of_place in by_place.items():
            for at in range(0, len(of_place), AT_ONCE):
                piece = of_place[at : at + AT_ONCE]
                facts = [(one.offset, one.ms, one.failed) for one in piece]
                command = shared_back_command(self._line, place, self._owner.member_id, facts)
                calls.append(_Call(command, place, [(one.batch, (one.offset,)) for one in piece], None, "back"))
        return calls


def pieces_of(ranges: Iterable[Range]) -> list[list[Range]]:
    """Return ranges in pieces that one call each takes."""
    pieces: list[list[Range]] = []
    room = 0
    for begin, last in ranges:
        first = begin
        while first <= last:
            if room <= 0 or len(pieces[-1]) >= RANGES:
                pieces.append([])
                room = SETTLE_LIMIT
            upto = min(last, first + room - 1)
            pieces[-1].append((first, upto))
            room -= upto - first + 1
            first = upto + 1
    return pieces


def _all_of(waiting: deque[Any]) -> list[Any]:
    return [waiting.popleft() for _ in range(len(waiting))]
