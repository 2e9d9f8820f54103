"""Start messages with care where owners died: so that one which kills its consumer is found, and no other pays for it.

The first death is taken as chance. After the second one in a row, each message that the former owners may have had in
hand is noted on the server before it is started, with some that follow it in its worker's hand. What was noted when the
next one dies is then started alone, and is to blame if its owner dies once more: a failed attempt, as if its handler
had said so.
"""

from __future__ import annotations

import threading
from itertools import islice

from mqlayer.consuming.clock import clock
from mqlayer.consuming.holdings import Held, Lane, Start, State
from mqlayer.domain.message import Record
from mqlayer.errors import HandlerFault

LOOK_AGAIN_S = 0.1
NOTED_AT_ONCE = 16
"""How many messages of a lane are noted as started at a time: a round trip for each is dear, and so is each suspect."""
SETTLED_AGAIN_S = 0.005
SETTLED_WAIT_S = 1.0
"""How long the next suspect waits for the one before to be settled: else that is blamed for what the next one does."""


class NoAnswer(HandlerFault):
    """The process that handled the message ended before its handler did."""


class Caution:
    """Who of a member's workers is at a message that has to be alone, or beside others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._beside = 0
        self._alone = False
        # The last message that was started alone, and when it ended.
        self._former: tuple[Held, int, float] | None = None

    def begin(self, lane: Lane, record: Record, wake: threading.Event) -> bool:
        """Wait until a message may be started, and have that noted; False where its holding is gone meanwhile.

        `wake` has the settler of its node note it. Raises NoAnswer where it was started alone before, and never ended.
        """
        held, offset = lane.held, record.offset
        if lane.resumed:
            raise NoAnswer("nobody answered")
        if offset in held.died:
            held.died.discard(offset)
            held.suspects.add(offset)
            raise NoAnswer("nobody answered")
        alone = offset in held.suspects
        if not self._enter(held, offset, alone=alone):
            return False
        if offset in held.noted or self._note(held, _starts(lane, record, alone=alone), wake):
            return True
        self.end(lane, record)
        return False

    def end(self, lane: Lane, record: Record) -> None:
        """Let others start."""
        with self._changed:
            if record.offset in lane.held.suspects:
                self._alone = False
                self._former = (lane.held, record.offset, clock())
            else:
                self._beside -= 1
            self._changed.notify_all()

    def _enter(self, held: Held, offset: int, *, alone: bool) -> bool:
        with self._changed:
            while (others := self._alone or (alone and self._beside > 0)) or (alone and self._unsettled(offset)):
                if held.state is not State.OPEN:
                    return False
                self._changed.wait(LOOK_AGAIN_S if others else SETTLED_AGAIN_S)
            if alone:
                self._alone = True
            else:
                self._beside += 1
            return True

    def _unsettled(self, offset: int) -> bool:
        """Say whether the server may still take another message for one that was started alone and never ended."""
        if self._former is None:
            return False
        held, former, ended = self._former
        # Settled ones have no count any more; that of one that failed goes before any start.
        waits = held.state is State.OPEN and former != offset and held.attempts.get(former) == 0
        return waits and clock() < ended + SETTLED_WAIT_S

    def _note(self, held: Held, starts: list[Start], wake: threading.Event) -> bool:
        """Have starts noted on the server; False where the holding is gone meanwhile."""
        held.starts.extend(starts)
        wake.set()
        for start in starts:
            while not start.noted.wait(LOOK_AGAIN_S):
                if held.state is not State.OPEN:
                    return False
            # To be forgotten on the server once it is settled.
            held.attempts.setdefault(start.offset, 0)
            if not start.alone:
                held.noted.add(start.offset)
        return held.state is State.OPEN


def _starts(lane: Lane, record: Record, *, alone: bool) -> list[Start]:
    """Return what is to be noted before a message is started: the message, and what follows it in its worker's hand."""
    if alone:
        return [Start(record.offset, alone=True)]
    held, until = lane.held, lane.caution
    later = (r.offset for r in lane.batch if record.offset < r.offset < until and _is_new(held, r.offset))
    return [Start(offset, alone=False) for offset in (record.offset, *islice(later, NOTED_AT_ONCE - 1))]


def _is_new(held: Held, offset: int) -> bool:
    return offset not in held.noted and offset not in held.suspects and offset not in held.died
