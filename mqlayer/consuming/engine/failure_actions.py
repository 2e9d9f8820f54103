"""What becomes of a message whose handling failed: it waits in place, its key is parked, or it leaves the group.

Short waits are spent in place, in the member. Longer ones are spent parked, in Postgres: what waits in place holds
committed back, and with it the trimming of the stream and the reach of the ack bitmap, whatever comes behind it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from mqlayer.domain.retry_rules import RetryRules
from mqlayer.errors import PauseKey, Reject, RetryLater, Skip
from mqlayer.parking import DeathCause, ParkCause

IN_PLACE_S: Final = 10.0
"""For how long after its first failure a message may wait in place, its next wait included."""


class RetryInPlace(NamedTuple):
    """Try it again in place, after so many seconds. `blocked`: its attempts ran out, and the group wants no end."""

    attempts: int
    seconds: float
    blocked: bool = False


class ParkKey(NamedTuple):
    """Park its key, for so many seconds or until an operator says so. `blocked`: as of Wait."""

    attempts: int
    cause: ParkCause
    seconds: float | None
    blocked: bool = False


class DeadLetter(NamedTuple):
    """Let the message leave the group, its body kept or not."""

    attempts: int
    cause: DeathCause
    reason: str
    keep_body: bool


FailureAction = RetryInPlace | ParkKey | DeadLetter


def failure_action(
    error: BaseException, rules: RetryRules, *, before: int, failing_s: float, share: float, parked: bool, text: str
) -> FailureAction:
    """Return what becomes of a message.

    `before`: its failed attempts before this one; `failing_s`: since when it fails here; `share`: a random number from
    0 to 1; `parked`: whether its key is parked; `text`: the error as it may be kept.
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


def _retry_or_park(attempts: int, cause: ParkCause, wait_s: float, *, in_place: bool) -> FailureAction:
    return RetryInPlace(attempts, wait_s) if in_place else ParkKey(attempts, cause, wait_s)


def _final_action(attempts: int, cause: DeathCause, rules: RetryRules, text: str, *, parked: bool) -> FailureAction:
    """There are no further attempts: the group's policy decides."""
    match rules.policy:
        case "block":
            # For ever, and where it is: whoever chose this wants nothing to pass.
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
