"""Find messages that kill their consumer.

After two deaths in a row, starts are recorded; those recorded at the next death start alone, and the one that dies
again has failed (`docs/design/decisions/0022-attempts-counted-after-two-deaths.md`).
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
"""Starts per call: round trips and suspects are both expensive."""
SETTLED_RECHECK_S = 0.005
SETTLED_WAIT_S = 1.0
"""Wait for the former suspect's settling, which a crash would else blame."""


class ConsumerCrashed(HandlerFault):
    """The process ended before the message's handler did."""


class PoisonMessageGuard:
    """Admits guarded starts, alone or beside others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._beside = 0
        self._alone = False
        # The last message that ran alone, and when it ended.
        self._former: tuple[OwnedPartition, int, float] | None = None

    def begin(self, key_queue: KeyQueue, record: Record, wake: threading.Event) -> bool:
        """Wait for admission and record the start; False where the partition is gone.

        `wake` wakes the settler. Raises ConsumerCrashed where a lone start never ended.
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
        """End a guarded start."""
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
        """Say whether a crash now would blame the former suspect."""
        if self._former is None:
            return False
        owned, former, ended = self._former
        # Settled messages have no count; a failed one's count is sent before any start.
        waits = owned.state is OwnershipState.OPEN and former != offset and owned.attempts.get(former) == 0
        return waits and clock() < ended + SETTLED_WAIT_S

    def _record(self, owned: OwnedPartition, starts: list[GuardedStart], wake: threading.Event) -> bool:
        owned.guarded_starts.extend(starts)
        wake.set()
        for start in starts:
            while not start.recorded.wait(RECHECK_S):
                if owned.state is not OwnershipState.OPEN:
                    return False
            # Makes the settler delete the count with the settlement.
            owned.attempts.setdefault(start.offset, 0)
            if not start.alone:
                owned.starts_recorded.add(start.offset)
        return owned.state is OwnershipState.OPEN


def _starts(key_queue: KeyQueue, record: Record, *, alone: bool) -> list[GuardedStart]:
    if alone:
        return [GuardedStart(record.offset, alone=True)]
    owned, until = key_queue.owned, key_queue.guarded_below
    later = (r.offset for r in key_queue.batch if record.offset < r.offset < until and _is_new(owned, r.offset))
    return [GuardedStart(offset, alone=False) for offset in (record.offset, *islice(later, RECORDED_AT_ONCE - 1))]


def _is_new(owned: OwnedPartition, offset: int) -> bool:
    return offset not in owned.starts_recorded and offset not in owned.suspects and offset not in owned.died
