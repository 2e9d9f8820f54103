"""Find messages that kill their consumer.

After two deaths in a row, starts are recorded; those recorded at the next death start alone; dying again counts as
failed (`docs/design/decisions/0022-attempts-counted-after-two-deaths.md`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import islice

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.ordered.attempts import GuardedStart
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, OwnershipState
from mqlayer.domain.message import Record
from mqlayer.domain.routing import NodeId
from mqlayer.errors import HandlerFault

RECHECK_S = 0.1
RECORDED_AT_ONCE = 16
"""Starts per call: round trips and suspects are both expensive."""
SETTLED_RECHECK_S = 0.005
SETTLED_WAIT_S = 1.0
"""Wait for the former suspect's settling, which a crash would else blame."""


class ConsumerCrashed(HandlerFault):
    """The process ended before the message's handler did."""


class PoisonMessageGuard:
    """Admits guarded starts, alone or beside others.

    `wake_settler` wakes a node's settler, which records them; False without one.
    """

    def __init__(self, wake_settler: Callable[[NodeId], bool]) -> None:
        self._wake_settler = wake_settler
        self._changed = threading.Condition()
        self._beside = 0
        self._alone = False
        # The last message that ran alone, and when it ended.
        self._former: tuple[OwnedPartition, int, float] | None = None

    def begin(self, key_queue: KeyQueue, record: Record) -> bool:
        """Wait for admission and record the start; False where the partition is gone.

        Raises ConsumerCrashed where a lone start never ended.
        """
        owned, offset = key_queue.owned, record.offset
        if key_queue.resumed:
            raise ConsumerCrashed("nobody answered")
        if owned.attempts.blame(offset):
            raise ConsumerCrashed("nobody answered")
        alone = owned.attempts.is_suspect(offset)
        if not self._enter(owned, offset, alone=alone):
            return False
        if owned.attempts.is_recorded(offset) or self._record(owned, _starts(key_queue, record, alone=alone)):
            return True
        self.end(key_queue, record)
        return False

    def end(self, key_queue: KeyQueue, record: Record) -> None:
        """End a guarded start."""
        with self._changed:
            if key_queue.owned.attempts.is_suspect(record.offset):
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
        if self._former is None:
            return False
        owned, former, ended = self._former
        # Settled messages have no count; a failed one's count is sent before any start.
        waits = owned.state is OwnershipState.OPEN and former != offset and owned.attempts.get(former, -1) == 0
        return waits and clock() < ended + SETTLED_WAIT_S

    def _record(self, owned: OwnedPartition, starts: list[GuardedStart]) -> bool:
        owned.attempts.request_starts(starts)
        if not self._wake_settler(owned.assignment.node):
            return False
        for start in starts:
            while not start.recorded.wait(RECHECK_S):
                if owned.state is not OwnershipState.OPEN:
                    return False
            owned.attempts.started(start)
        return owned.state is OwnershipState.OPEN


def _starts(key_queue: KeyQueue, record: Record, *, alone: bool) -> list[GuardedStart]:
    if alone:
        return [GuardedStart(record.offset, alone=True)]
    attempts, until = key_queue.owned.attempts, key_queue.guarded_below
    later = (r.offset for r in key_queue.batch if record.offset < r.offset < until and attempts.is_new(r.offset))
    return [GuardedStart(offset, alone=False) for offset in (record.offset, *islice(later, RECORDED_AT_ONCE - 1))]
