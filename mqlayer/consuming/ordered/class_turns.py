"""The key classes' side of the dispatcher: classes take turns, and floods wait as offsets."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from mqlayer.consuming.engine.class_limits import NO_LIMITS, ClassLimits
from mqlayer.consuming.engine.fair_queue import FairQueue
from mqlayer.consuming.ordered.class_backlogs import ClassBacklogs
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, OwnershipState
from mqlayer.consuming.ordered.ready_queues import ReadyQueues
from mqlayer.domain.key_classes import KeyClassRule
from mqlayer.domain.message import Record


class ClassTurns:
    """Follows the group's rule, and loads backlogs. Thread-safe."""

    def __init__(self, queues: ReadyQueues) -> None:
        self._queues = queues
        self._rule: KeyClassRule | None = None
        self._limits = NO_LIMITS

    def follow(self, rule: KeyClassRule | None, limits: ClassLimits = NO_LIMITS) -> None:
        """Have classes take turns within limits, or not."""
        if (rule, limits) == (self._rule, self._limits):
            return
        with self._queues.lock:
            if rule != self._rule:
                self._queues.ready = _sorted(rule, list(self._queues.ready))
            self._rule, self._limits = rule, limits
            if isinstance(self._queues.ready, FairQueue):
                self._queues.ready.limit(limits)
            self._queues.wake()

    @property
    def active(self) -> bool:
        """Whether the group has key classes."""
        return self._rule is not None

    @property
    def limits(self) -> ClassLimits:
        """The limits of each class."""
        return self._limits

    def wanted(self, most: int) -> dict[bytes, float]:
        """Return the permits to ask for, by class."""
        with self._queues.lock:
            self._queues.collect_finished()
            ready = self._queues.ready
            return ready.wanted(most) if isinstance(ready, FairQueue) else {}

    def grant(self, permits: Mapping[bytes, float]) -> None:
        """Add permits, and wake workers."""
        with self._queues.lock:
            if isinstance(self._queues.ready, FairQueue):
                for name, granted in permits.items():
                    self._queues.ready.grant(name, granted)
                self._queues.wake()

    def may_read(self, owned: OwnedPartition, bounds: tuple[int, int], *, keeps: bool) -> bool | None:
        """Say whether to read past its room; None: it has no backlogs. `keeps`: whether backlogs are allowed."""
        rule = self._rule if keeps else None
        backlogs = owned.backlogs
        if backlogs is None and rule is None:
            return None
        with self._queues.lock:
            if (None if backlogs is None else backlogs.rule) != rule:
                if backlogs:
                    # Another rule might overtake them.
                    backlogs.bound(*bounds)
                    return False
                owned.backlogs = backlogs = None if rule is None else ClassBacklogs(rule)
            if backlogs is None:
                return None
            backlogs.bound(*bounds)
            return True

    def to_load(self, owned: OwnedPartition, most: int) -> tuple[bytes, list[int]] | None:
        """Return a class and the first offsets of its backlog, which has room."""
        if not owned.backlogs:
            return None
        with self._queues.lock:
            self._queues.collect_finished()
            room = owned.room
            return owned.backlogs.to_load(room.count, room.bytes, room.record_bytes, most)

    def load(self, owned: OwnedPartition, name: bytes, offsets: list[int], records: list[Record]) -> None:
        """Queue the records of those offsets."""
        with self._queues.lock:
            if owned.state is OwnershipState.OPEN and owned.backlogs is not None:
                owned.backlogs.loaded(name, offsets)
                self._queues.enqueue(owned.add(records))
                if owned.to_park:
                    self._queues.on_parking()


def _sorted(rule: KeyClassRule | None, waiting: list[KeyQueue]) -> deque[KeyQueue] | FairQueue[KeyQueue]:
    for key_queue in waiting:
        key_queue.class_turn = None
    return deque(waiting) if rule is None else FairQueue(rule, waiting)
