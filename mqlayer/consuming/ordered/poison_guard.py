"""Start messages with care where owners died: so that one which kills its consumer is found, and no other pays for it.

The first death is taken as chance. After the second one in a row, each message that the former owners may have had in
hand is noted on the server before it is started, with some that follow it in its worker's hand. What was noted when the
next one dies is then started alone, and is to blame if its owner dies once more: a failed attempt, as if its handler
had said so.
"""

from __future__ import annotations

import threading
from itertools import islice

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.ordered.owned_partitions import GuardedStart, KeyQueue, OwnedPartition, OwnershipState
from mqlayer.domain.message import Record
from mqlayer.errors import HandlerFault

RECHECK_S = 0.1
RECORDED_AT_ONCE = 16
"""How many messages of a key queue are noted as started at a time: a round trip for each is dear, and so is each
suspect."""
SETTLED_RECHECK_S = 0.005
SETTLED_WAIT_S = 1.0
"""How long the next suspect waits for the one before to be settled: else that is blamed for what the next one does."""


class ConsumerCrashed(HandlerFault):
    """The process that handled the message ended before its handler did."""


class PoisonMessageGuard:
    """Who of a member's workers is at a message that has to be alone, or beside others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._beside = 0
        self._alone = False
        # The last message that was started alone, and when it ended.
        self._former: tuple[OwnedPartition, int, float] | None = None

    def begin(self, key_queue: KeyQueue, record: Record, wake: threading.Event) -> bool:
        """Wait until a message may be started, and have that noted; False where its owned partition is gone meanwhile.

        `wake` has the settler of its node note it. Raises ConsumerCrashed where it was started alone before, and never
        ended.
        """
        owned, offset = key_queue.owned, record.offset
        if key_queue.resumed:
            raise ConsumerCrashed("nobody answered")
        if offset in owned.died:
            owned.died.discard(offset)
            owned.suspects.add(offset)
            raise ConsumerCrashed("nobody answered")
        alone = offset in owned.suspects
        if not self._enter(owned, offset, alone=alone):
            return False
        if offset in owned.starts_recorded or self._record(owned, _starts(key_queue, record, alone=alone), wake):
            return True
        self.end(key_queue, record)
        return False

    def end(self, key_queue: KeyQueue, record: Record) -> None:
        """Let others start."""
        with self._changed:
            if record.offset in key_queue.owned.suspects:
                self._alone = False
                self._former = (key_queue.owned, record.offset, clock())
            else:
                self._beside -= 1
            self._changed.notify_all()

    def _enter(self, owned: OwnedPartition, offset: int, *, alone: bool) -> bool:
        with self._changed:
            while (others := self._alone or (alone and self._beside > 0)) or (alone and self._unsettled(offset)):
                if owned.state is not OwnershipState.OPEN:
                    return False
                self._changed.wait(RECHECK_S if others else SETTLED_RECHECK_S)
            if alone:
                self._alone = True
            else:
                self._beside += 1
            return True

    def _unsettled(self, offset: int) -> bool:
        """Say whether the server may still take another message for one that was started alone and never ended."""
        if self._former is None:
            return False
        owned, former, ended = self._former
        # Settled ones have no count any more; that of one that failed goes before any start.
        waits = owned.state is OwnershipState.OPEN and former != offset and owned.attempts.get(former) == 0
        return waits and clock() < ended + SETTLED_WAIT_S

    def _record(self, owned: OwnedPartition, starts: list[GuardedStart], wake: threading.Event) -> bool:
        """Have starts noted on the server; False where the owned partition is gone meanwhile."""
        owned.guarded_starts.extend(starts)
        wake.set()
        for start in starts:
            while not start.recorded.wait(RECHECK_S):
                if owned.state is not OwnershipState.OPEN:
                    return False
            # To be forgotten on the server once it is settled.
            owned.attempts.setdefault(start.offset, 0)
            if not start.alone:
                owned.starts_recorded.add(start.offset)
        return owned.state is OwnershipState.OPEN


def _starts(key_queue: KeyQueue, record: Record, *, alone: bool) -> list[GuardedStart]:
    """Return what is to be noted before a message is started: the message, and what follows it in its worker's hand."""
    if alone:
        return [GuardedStart(record.offset, alone=True)]
    owned, until = key_queue.owned, key_queue.guarded_below
    later = (r.offset for r in key_queue.batch if record.offset < r.offset < until and _is_new(owned, r.offset))
    return [GuardedStart(offset, alone=False) for offset in (record.offset, *islice(later, RECORDED_AT_ONCE - 1))]


def _is_new(owned: OwnedPartition, offset: int) -> bool:
    return offset not in owned.starts_recorded and offset not in owned.suspects and offset not in owned.died
