"""Decide what follows a failed message of a shared group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from mqlayer.consuming.engine.circuit_breaker import HOLD_S
from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.events import MemberEvents
from mqlayer.consuming.engine.failure_actions import DeadLetter, FailureAction, RetryInPlace, failure_action
from mqlayer.consuming.shared.failure_queues import FailureQueues
from mqlayer.consuming.shared.fetched_batch import FetchedBatch
from mqlayer.consuming.shared.results import SharedResults
from mqlayer.domain.message import NO_KEY, ParkedRecord, Record
from mqlayer.domain.retry_rules import RetryRules
from mqlayer.domain.time_to_live import EXPIRED_REASON, Expiry
from mqlayer.errors import MessageTimeout, StaleOwner
from mqlayer.logs import event_logger
from mqlayer.parking import DeadLetterEntry, FailedAttempt
from mqlayer.randomness import RNG

log = event_logger(__name__)

STALE_WAIT_MS: Final = 200
"""Delay where the fence found a newer epoch."""


class SharedEvents(MemberEvents):
    """Adds a shared group's failures."""

    def handler_failed(
        self, batch: FetchedBatch, record: Record, error: BaseException, action: FailureAction, *, counted: bool
    ) -> None:
        """Report a failure, and what follows."""
        identity = record.identity
        self.stats.timed_out += isinstance(error, MessageTimeout)
        if counted:
            self.attempt_failed(error)
        facts: dict[str, Any] = self.facts(batch) | {"offset": record.offset, "lp": identity.lp, "seq": identity.seq}
        facts |= self.failure_facts(error, action)
        log.warning("handler_failed", extra=facts)
        if not isinstance(action, DeadLetter):
            self.emit("failed", batch, identity.lp, seq=identity.seq, attempts=action.attempts, wait_s=action.seconds,
                      error=self.texts.text(error))  # fmt: skip


class SharedFailures:
    """Decides and acts."""

    def __init__(self, core: MemberCore, events: SharedEvents, results: SharedResults, queues: FailureQueues) -> None:
        self._settings, self._beat, self._breaker = core.settings, core.beat, core.settings.breaker
        self._events, self._results, self._queues = events, results, queues

    def failed(self, batch: FetchedBatch, record: Record, error: BaseException) -> None:
        """Count a failed attempt, where the error counts; act on it."""
        if isinstance(error, StaleOwner):
            # Another owner acted under a newer epoch.
            self._events.fenced()
            self._beat.set()
            self._results.nack(batch, record.offset, STALE_WAIT_MS, None)
            return
        before, text = attempts_before(batch, record), self._events.texts.text(error)
        action = failure_action(
            error, self._settings.rules, before=before, failing_s=0.0, share=RNG.random(), parked=True, text=text
        )
        # Held from the first key on: a count that a message was given back with can't be taken back.
        held = self._breaker.failed(record, key_of(record), error, leaves=True)
        if held:
            action = RetryInPlace(before, HOLD_S)
            self._events.stats.held += 1
        counted = action.attempts > before
        if counted:
            timed_out = isinstance(error, MessageTimeout)
            self._queues.attempt(FailedAttempt(record.identity, action.attempts, text, batch.partition, timed_out))
        self._events.handler_failed(batch, record, error, action, counted=counted)
        if isinstance(action, DeadLetter):
            dead_letter = DeadLetterEntry(record, action.cause, action.reason, action.attempts, action.keep_body)
            self._queues.dead_letter(batch, dead_letter)
        else:
            # A suspect's attempt was counted when it began.
            failed = action.attempts if batch.suspect or not held else None
            self._results.nack(batch, record.offset, round(1000 * (action.seconds or 0.0)), failed)

    def expired(self, batch: FetchedBatch, records: Sequence[Record], expiry: Expiry) -> None:
        """Settle expired messages, or let them die."""
        if expiry.rule == "settle":
            self._results.expired(batch, [record.offset for record in records])
            return
        for record in records:
            attempts = attempts_before(batch, record)
            self._queues.dead_letter(
                batch, DeadLetterEntry(record, "expired", EXPIRED_REASON, attempts, keep_body=True)
            )


def key_of(record: Record) -> bytes:
    """Return a message's key; one without a key is a key of its own."""
    return record.key if record.key != NO_KEY else b"%b%d" % (NO_KEY, record.offset)


def attempts_before(batch: FetchedBatch, record: Record) -> int:
    """Return a message's earlier failed attempts."""
    return record.attempts if isinstance(record, ParkedRecord) else batch.attempts.get(record.offset, 0)


def exhausted(batch: FetchedBatch, rules: RetryRules) -> DeadLetterEntry | None:
    """Return a suspect's dead letter if its attempts ran out."""
    record = batch.records[0]
    before = attempts_before(batch, record)
    if before < rules.attempt_limit:
        return None
    keep = rules.policy != "skip"
    reason = f"{before} attempts, the last without an answer: the message may end its process"
    return DeadLetterEntry(record, "exhausted" if keep else "skipped", reason, before, keep)
