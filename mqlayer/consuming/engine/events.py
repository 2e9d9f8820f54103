"""A member's counts, log facts and events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mqlayer.consuming.engine.failure_actions import FailureAction
from mqlayer.consuming.engine.options import MemberStats
from mqlayer.events import Event, EventKind, Hook, emit
from mqlayer.groups.group import Group
from mqlayer.groups.members import Joining, MemberSession
from mqlayer.logs import TRACE, event_logger
from mqlayer.metrics import MemberMeters
from mqlayer.parking import DeadLetterEntry
from mqlayer.runtime.error_text import ErrorTexts
from mqlayer.traces import take_failed_ids

log = event_logger(__name__)


class PartitionEpoch(Protocol):
    """A partition under an epoch."""

    @property
    def partition(self) -> int:
        """The partition's id."""

    @property
    def epoch(self) -> int:
        """The epoch."""


@dataclass(frozen=True, slots=True)
class Reporting:
    """Who hears of events and of sessions, and how errors are told.

    `joining` gets each session before it begins.
    """

    hooks: Sequence[Hook] = ()
    texts: ErrorTexts = field(default_factory=ErrorTexts)
    joining: Joining | None = None


class MemberEvents:
    """Counts, logs and passes on what happens."""

    def __init__(self, group: Group, reporting: Reporting | None, meters: MemberMeters | None = None) -> None:
        self.stats = MemberStats()
        self._group, self._reporting, self._meters = group, reporting or Reporting(), meters

    @property
    def texts(self) -> ErrorTexts:
        """How errors are told."""
        return self._reporting.texts

    def joining(self, session: MemberSession) -> None:
        """Tell who waits for this process's end of a session that is about to begin."""
        if self._reporting.joining is not None:
            self._reporting.joining(session)

    def handled(self, count: int) -> None:
        """Count handled messages."""
        self.stats.handled += count

    def settled(self, count: int) -> None:
        """Count settled messages."""
        self.stats.settled += count

    def unmatched(self, count: int) -> None:
        """Count filtered and void messages."""
        self.stats.unmatched += count

    def expired(self, place: PartitionEpoch, count: int) -> None:
        """Report settled messages whose time to live ended."""
        self.stats.expired += count
        self.emit("expired", place, None, count=count)

    def fenced(self) -> None:
        """Count a replaced epoch."""
        self.stats.fenced += 1

    def lease_lost(self) -> None:
        """Count an expired lease."""
        self.stats.leases_lost += 1

    def attempt_failed(self, error: BaseException) -> None:
        """Count a failed attempt."""
        self.stats.failed += 1
        if self._meters is not None:
            self._meters.failed(error)

    def dead_lettered(self, place: PartitionEpoch, dead_letter: DeadLetterEntry) -> None:
        """Report a message that left the group."""
        expired = dead_letter.cause == "expired"
        self.stats.dead += dead_letter.keep_body
        self.stats.skipped += not dead_letter.keep_body and not expired
        self.stats.expired += expired
        identity = dead_letter.record.identity
        facts = self.facts(place) | {"lp": identity.lp, "seq": identity.seq, "cause": dead_letter.cause}
        log.warning(
            "message_dead_lettered", extra=facts | {"attempts": dead_letter.attempts, "kept": dead_letter.keep_body}
        )
        kind: EventKind = "dead" if dead_letter.keep_body else "expired" if expired else "skipped"
        self.emit(kind, place, identity.lp, seq=identity.seq,
                  attempts=dead_letter.attempts, cause=dead_letter.cause)  # fmt: skip

    def breaker_opened(self, cause: str, keys: int, member: str) -> None:
        """Report a circuit breaker that this member opened."""
        facts = {"topic": self._group.topic, "group": self._group.name, "cause": cause, "keys": keys}
        log.error("breaker_opened", extra=facts)
        self._emit_breaker("breaker_opened", cause, keys, member)

    def breaker_closed(self, seconds: float) -> None:
        """Report a circuit breaker that this member closed."""
        facts = {"topic": self._group.topic, "group": self._group.name, "seconds": round(seconds, 1)}
        log.warning("breaker_closed", extra=facts)
        self._emit_breaker("breaker_closed", "", 0, "")

    def _emit_breaker(self, kind: EventKind, cause: str, keys: int, member: str) -> None:
        event = Event(kind, self._group.topic, self._group.name, cause=cause, count=keys, actor=member)
        emit(event, self._reporting.hooks)

    def facts(self, place: PartitionEpoch) -> dict[str, Any]:
        """Return a partition's log facts."""
        group = self._group
        return {"topic": group.topic, "group": group.name, "partition": place.partition, "epoch": place.epoch}

    def failure_facts(self, error: BaseException, action: FailureAction) -> dict[str, Any]:
        """Return what a failure's log line says of it; a new one comes with its traceback."""
        facts = {"attempt": action.attempts, "error": self.texts.text(error), "verdict": type(action).__name__.lower()}
        facts |= take_failed_ids(error)
        trace = self.texts.trace_if_new(error)
        return facts if trace is None else facts | {TRACE: trace}

    def emit(self, kind: EventKind, place: PartitionEpoch, lp: int | None, **facts: Any) -> None:
        """Pass an event to the hooks."""
        emit(Event(kind, self._group.topic, self._group.name, place.partition, lp, **facts), self._reporting.hooks)
