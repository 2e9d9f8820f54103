"""Decide a failed message's next step: retry in place, park its key, or dead-letter it.

Long waits are spent in Postgres: in the stream they would hold back committed, trimming and the ack bitmap.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from mqlayer.domain.retry_rules import RetryRules
from mqlayer.errors import PauseKey, Reject, RetryLater, Skip
from mqlayer.parking import DeathCause, ParkCause

IN_PLACE_S: Final = 10.0
"""Longest time in place since the first failure, next wait included."""


class RetryInPlace(NamedTuple):
    """Retry in place after `seconds`. `blocked`: attempts ran out, under the policy `block`."""

    attempts: int
    seconds: float
    blocked: bool = False


class ParkKey(NamedTuple):
    """Park the key for `seconds`; None: until an operator acts. `blocked` as above."""

    attempts: int
    cause: ParkCause
    seconds: float | None
    blocked: bool = False


class DeadLetter(NamedTuple):
    """Let the message leave the group; its key goes on."""

    attempts: int
    cause: DeathCause
    reason: str
    keep_body: bool


FailureAction = RetryInPlace | ParkKey | DeadLetter


def failure_action(
    error: BaseException, rules: RetryRules, *, before: int, failing_s: float, share: float, parked: bool, text: str
) -> FailureAction:
    """Return a failed message's next step.

    `before`: earlier failed attempts; `failing_s`: seconds since the first failure here; `share`: random, 0 to 1;
    `parked`: key is parked; `text`: storable error text.
    """
    if isinstance(error, Skip):
        return DeadLetter(before, "skipped", text, keep_body=False)
    if isinstance(error, PauseKey):
        short = failing_s + error.seconds <= IN_PLACE_S
        return _retry_or_park(before, "paused", error.seconds, in_place=short and not parked)
    attempts = before + 1
    final = isinstance(error, Reject) or rules.is_final(error)
    if final or attempts >= rules.attempt_limit:
        return _final_action(attempts, "rejected" if final else "exhausted", rules, text, parked=parked)
    wait_s = error.seconds if isinstance(error, RetryLater) else rules.wait_s(attempts, share)
    short = failing_s + wait_s <= IN_PLACE_S or rules.policy == "block"
    return _retry_or_park(attempts, "retry", wait_s, in_place=short and not parked)


def wait_in_place_s(rules: RetryRules, attempts: int, seconds: float | None) -> float:
    """Return the wait of a message without parking room."""
    return rules.wait_s(max(1, attempts), 0.0) if seconds is None else seconds


def _retry_or_park(attempts: int, cause: ParkCause, wait_s: float, *, in_place: bool) -> FailureAction:
    return RetryInPlace(attempts, wait_s) if in_place else ParkKey(attempts, cause, wait_s)


def _final_action(attempts: int, cause: DeathCause, rules: RetryRules, text: str, *, parked: bool) -> FailureAction:
    match rules.policy:
        case "block":
            # Endlessly, where it waits now: this policy lets nothing pass.
            wait_s = rules.backoff_s[-1]
            return (
                ParkKey(attempts, "retry", wait_s, blocked=True)
                if parked
                else RetryInPlace(attempts, wait_s, blocked=True)
            )
        case "dead_letter":
            return DeadLetter(attempts, cause, text, keep_body=True)
        case "skip":
            return DeadLetter(attempts, "skipped", text, keep_body=False)
        case "park":
            return ParkKey(attempts, "rejected" if cause == "rejected" else "exhausted", None)
