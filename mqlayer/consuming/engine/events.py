"""A member's counts, log facts and events."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from mqlayer.consuming.engine.options import MemberStats
from mqlayer.events import Event, EventKind, Hook, emit
from mqlayer.groups.group import Group
from mqlayer.parking import DeadLetterEntry

log = logging.getLogger(__name__)


class PartitionEpoch(Protocol):
    """A partition under an epoch."""

    @property
    def partition(self) -> int:
        """The partition's id."""

    @property
    def epoch(self) -> int:
        """The epoch."""


class MemberEvents:
    """Counts, logs and passes on what happens."""

    def __init__(self, group: Group, hooks: Sequence[Hook]) -> None:
        self.stats = MemberStats()
        self._group, self._hooks = group, hooks

    def handled(self, count: int) -> None:
        """Count handled messages."""
        self.stats.handled += count

    def settled(self, count: int) -> None:
        """Count settled messages."""
        self.stats.settled += count

    def unmatched(self, count: int) -> None:
        """Count filtered and void messages."""
        self.stats.unmatched += count

    def fenced(self) -> None:
        """Count a replaced epoch."""
        self.stats.fenced += 1

    def dead_lettered(self, place: PartitionEpoch, dead_letter: DeadLetterEntry) -> None:
        """Report a message that left the group."""
        self.stats.dead += dead_letter.keep_body
        self.stats.skipped += not dead_letter.keep_body
        identity = dead_letter.record.identity
        facts = self.facts(place) | {"lp": identity.lp, "seq": identity.seq, "cause": dead_letter.cause}
        log.warning(
            "message_dead_lettered", extra=facts | {"attempts": dead_letter.attempts, "kept": dead_letter.keep_body}
        )
        self.emit("dead" if dead_letter.keep_body else "skipped", place, identity.lp, seq=identity.seq,
                  attempts=dead_letter.attempts, cause=dead_letter.cause)  # fmt: skip

    def facts(self, place: PartitionEpoch) -> dict[str, Any]:
        """Return a partition's log facts."""
        group = self._group
        return {"topic": group.topic, "group": group.name, "partition": place.partition, "epoch": place.epoch}

    def emit(self, kind: EventKind, place: PartitionEpoch, lp: int, **facts: Any) -> None:
        """Pass an event to the hooks."""
        emit(Event(kind, self._group.topic, self._group.name, place.partition, lp, **facts), self._hooks)
