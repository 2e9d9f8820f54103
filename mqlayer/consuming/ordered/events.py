"""Events of an ordered member."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mqlayer.consuming.engine.events import MemberEvents
from mqlayer.consuming.engine.failure_actions import DeadLetter, FailureAction
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition
from mqlayer.domain.message import Record
from mqlayer.errors import MessageTimeout, PauseKey
from mqlayer.events import EventKind
from mqlayer.logs import event_logger
from mqlayer.parking import KeyEntry, KeyRef, ParkingLimit

log = event_logger(__name__)


class OrderedEvents(MemberEvents):
    """Adds ownership, parking and failures."""

    def acquired(self, owned: OwnedPartition, committed: int) -> None:
        """Report an opened partition."""
        log.info("partition_acquired", extra=self.facts(owned) | {"committed": committed})

    def lost(self, owned: OwnedPartition, by: str) -> None:
        """Report a partition that a later owner has."""
        log.warning("partition_lost", extra=self.facts(owned) | {"by": by})
        self.fenced()

    def handler_failed(
        self, owned: OwnedPartition, record: Record, error: BaseException, action: FailureAction, *, counted: bool
    ) -> None:
        """Report a failure, and what follows."""
        identity, text = record.identity, self.texts.text(error)
        if isinstance(error, MessageTimeout):
            self.stats.timed_out += 1
            self.emit("timed_out", owned, identity.lp, seq=identity.seq, attempts=action.attempts, error=text)
        if counted:
            self.attempt_failed(error)
        facts = self.facts(owned) | {"offset": record.offset, "lp": identity.lp, "seq": identity.seq}
        facts |= self.failure_facts(error, action)
        if not isinstance(action, DeadLetter):
            facts["wait_s"] = action.seconds
        blocked = not isinstance(action, DeadLetter) and action.blocked
        paused = isinstance(error, PauseKey)
        log.log(
            logging.ERROR if blocked else logging.WARNING, "key_paused" if paused else "handler_failed", extra=facts
        )
        if isinstance(action, DeadLetter):
            return
        kind: EventKind = "paused" if paused else "blocked" if blocked else "failed"
        self.stats.paused += paused
        self.stats.blocked += blocked and not paused
        self.emit(kind, owned, identity.lp, seq=identity.seq, attempts=action.attempts, wait_s=action.seconds,
                  error=text)  # fmt: skip

    def parked(self, owned: OwnedPartition, keys: Sequence[KeyEntry], messages: int) -> None:
        """Report parked keys."""
        self.stats.parked += messages
        for entry in keys:
            facts = self.facts(owned) | {"lp": entry.ref.lp, "cause": entry.cause, "wait_s": entry.wait_s}
            log.warning("key_parked", extra=facts | {"attempts": entry.attempts})
            self.emit("parked", owned, entry.ref.lp, attempts=entry.attempts, cause=entry.cause, wait_s=entry.wait_s)

    def parking_full(self, owned: OwnedPartition, lp: int, limit: ParkingLimit, *, seq: int | None = None) -> None:
        """Report missing room."""
        self.stats.parking_full += 1
        log.error("parking_full", extra=self.facts(owned) | {"lp": lp, "limit": limit})
        self.emit("parking_full", owned, lp, seq=seq, cause=limit)

    def unparked(self, owned: OwnedPartition, ref: KeyRef) -> None:
        """Report an unparked key."""
        self.stats.unparked += 1
        log.info("key_unparked", extra=self.facts(owned) | {"lp": ref.lp})
        self.emit("unparked", owned, ref.lp)
