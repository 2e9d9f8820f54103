"""Carry out what follows a worker's turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mqlayer.consuming.engine.failure_actions import DeadLetter, FailureAction, ParkKey, RetryInPlace
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.failure_decider import FailureDecider
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, parked_key_for
from mqlayer.domain.message import ParkedRecord, Record
from mqlayer.domain.time_to_live import EXPIRED_REASON, Expiry
from mqlayer.errors import AlreadyApplied, StaleOwner
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.parking import DeadLetterEntry
from mqlayer.runtime.error_text import where

log = event_logger(__name__)

RETRY_S: Final = 1.0
MOST_EXPIRED: Final = 100
"""Expired messages of a key that die together."""


class TurnResults:
    """Gives key queues back, by handlers' results.

    `handled` counts handled messages and wakes settlers; `fenced` drops a partition that a later owner has.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        decider: FailureDecider,
        *,
        handled: Callable[[int], None],
        fenced: Callable[[OwnedPartition, str], None],
    ) -> None:
        self._dispatcher, self._decider, self.handled, self._fenced = dispatcher, decider, handled, fenced
        self.breaker = decider.breaker

    def give_back(self, key_queue: KeyQueue, done: int, *, expired: int = 0) -> None:
        """Give back a key queue after `done` messages, of which `expired` had no handler."""
        if self.breaker.watching:
            self.breaker.ended(key_queue, key_queue.key, done - expired)
        self._give_back(key_queue, done)

    def expired(self, key_queue: KeyQueue, done: int, expiry: Expiry, now: float) -> bool:
        """Settle an expired message; False: it dies, and the key queue is given back."""
        if expiry.rule == "settle" and not key_queue.resumed:
            key_queue.owned.results.settle_expired(key_queue.batch[done : done + 1])
            return True
        leftover = list(key_queue.batch[done:])
        if key_queue.resumed:
            # A parked key's messages are in Postgres, where one leaves at a time.
            key_queue.action = self._death(key_queue, leftover[0], expiry)
            self._give_back(key_queue, done)
        else:
            ended = leftover[: expiry.count_ended(leftover[:MOST_EXPIRED], now)]
            dead_letters = [dead_letter_of(record, self._death(key_queue, record, expiry)) for record in ended]
            self._dispatcher.dead_letter(key_queue, leftover, dead_letters)
        if self.breaker.watching:
            self.breaker.ended(key_queue, key_queue.key, 0)
        return False

    def _death(self, key_queue: KeyQueue, record: Record, expiry: Expiry) -> DeadLetter:
        counted = key_queue.owned.attempts
        attempts = record.attempts if isinstance(record, ParkedRecord) else counted.get(record.offset)
        return DeadLetter(attempts, "expired", EXPIRED_REASON, keep_body=expiry.rule == "dead")

    def _give_back(self, key_queue: KeyQueue, done: int, *, delay_s: float = 0.0) -> None:
        if done == len(key_queue.batch):
            self._dispatcher.done(key_queue)
        else:
            self._dispatcher.finish(key_queue, list(key_queue.batch[done:]), delay_s=delay_s)

    def failed(self, key_queue: KeyQueue, done: int, error: BaseException) -> int:
        """Act on a handler's exception; return the handled count."""
        owned, record = key_queue.owned, key_queue.batch[done]
        action: FailureAction | None = None
        try:
            if isinstance(error, AlreadyApplied):
                key_queue.handled.append(record)
                done += 1
            elif isinstance(error, StaleOwner):
                self._fenced(owned, "fence")
            else:
                failpoint("handler.after_failure")
                action = self._decider.decide(key_queue, record, error)
        except Exception as fault:  # noqa: BLE001 - a worker that died would leave a member that handles less and less
            action = RetryInPlace(owned.attempts.get(record.offset), RETRY_S)
            log.error("failure_decision_failed", extra={"partition": owned.partition, "error": where(fault)})
        self._give_back_failed(key_queue, done, action)
        if self.breaker.watching:
            self.breaker.ended(key_queue, key_queue.key, 0)
        return done

    def _give_back_failed(self, key_queue: KeyQueue, done: int, action: FailureAction | None) -> None:
        leftover = list(key_queue.batch[done:])
        if key_queue.resumed or action is None:
            key_queue.action = action
            self._give_back(key_queue, done)
        elif isinstance(action, RetryInPlace):
            self._give_back(key_queue, done, delay_s=action.seconds)
        elif isinstance(action, ParkKey):
            self._dispatcher.park(key_queue, leftover, parked_key_for(action, key_queue, leftover[0]))
        else:
            self._dispatcher.dead_letter(key_queue, leftover, [dead_letter_of(leftover[0], action)])


def dead_letter_of(record: Record, action: DeadLetter) -> DeadLetterEntry:
    """Return a message as a dead one."""
    return DeadLetterEntry(record, action.cause, action.reason, action.attempts, action.keep_body)
