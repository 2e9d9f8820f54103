"""Count failures, ask `failure_action`; wait in place where parking is full."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mqlayer.consuming.engine.circuit_breaker import HOLD_S
from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.failure_actions import (
    FailureAction,
    ParkKey,
    RetryInPlace,
    failure_action,
    wait_in_place_s,
)
from mqlayer.consuming.ordered.events import OrderedEvents
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition
from mqlayer.domain.message import ParkedRecord, Record
from mqlayer.errors import MessageTimeout
from mqlayer.parking import FailedAttempt
from mqlayer.randomness import RNG


class FailureDecider:
    """Decides by the group's rules."""

    def __init__(
        self, core: MemberCore, events: OrderedEvents, record_attempt: Callable[[FailedAttempt], None]
    ) -> None:
        self._settings, self._own_limit = core.settings, core.options.parked_keys
        self.breaker = core.settings.breaker
        self._events, self._record_attempt = events, record_attempt

    def decide(self, key_queue: KeyQueue, record: Record, error: BaseException) -> FailureAction:
        """Count a failed attempt, unless it is held or the error does not count; return the action."""
        owned = key_queue.owned
        resumed, text = isinstance(record, ParkedRecord), self._events.texts.text(error)
        before = record.attempts if isinstance(record, ParkedRecord) else owned.attempts.get(record.offset)
        action = failure_action(
            error,
            self._settings.rules,
            before=before,
            failing_s=0.0 if resumed else owned.attempts.failing_s(record.offset),
            share=RNG.random(),
            parked=resumed,
            text=text,
        )
        if self.breaker.failed(key_queue, key_queue.key, error, leaves=not isinstance(action, RetryInPlace)):
            return self._hold(owned, record, error, before)
        if isinstance(action, ParkKey) and not resumed and len(owned.parked.by_name) >= self._parked_keys_limit:
            self._events.parking_full(owned, record.identity.lp, "keys", seq=record.identity.seq)
            wait_s = wait_in_place_s(self._settings.rules, action.attempts, action.seconds)
            action = RetryInPlace(action.attempts, wait_s, action.blocked)
        counted = action.attempts > before
        if counted:
            if not resumed:
                owned.attempts.count(record.offset, action.attempts)
                self.breaker.counted(partial(owned.attempts.give_back, record.offset, before))
            timed_out = isinstance(error, MessageTimeout)
            self._record_attempt(FailedAttempt(record.identity, action.attempts, text, owned.partition, timed_out))
        self._events.handler_failed(owned, record, error, action, counted=counted)
        return action

    def _hold(self, owned: OwnedPartition, record: Record, error: BaseException, before: int) -> FailureAction:
        owned.attempts.forget_time(record.offset)
        action = RetryInPlace(before, HOLD_S)
        self._events.handler_failed(owned, record, error, action, counted=False)
        self._events.stats.held += 1
        return action

    @property
    def _parked_keys_limit(self) -> int:
        limit = self._settings.rules.parked_keys_limit
        return limit if self._own_limit is None else min(self._own_limit, limit)
