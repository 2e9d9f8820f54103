"""What becomes of a message whose handling failed: it waits in place, its key is parked, or it leaves the group.

Short waits are spent in place, in the member. Longer ones are spent parked, in Postgres: what waits in place holds
committed back, and with it the trimming of the stream and the reach of the ack bitmap, whatever comes behind it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from mqlayer.domain.retrying import RetryRules
from mqlayer.errors import PauseKey, Reject, RetryLater, Skip
from mqlayer.parking import DeathCause, ParkCause

IN_PLACE_S: Final = 10.0
"""For how long after its first failure a message may wait in place, its next wait included."""


class Wait(NamedTuple):
    """Try it again in place, after so many seconds. `blocked`: its attempts ran out, and the group wants no end."""

    attempts: int
    seconds: float
    blocked: bool = False


class Park(NamedTuple):
    """Park its key, for so many seconds or until an operator says so. `blocked`: as of Wait."""

    attempts: int
    cause: ParkCause
    seconds: float | None
    blocked: bool = False


class Bury(NamedTuple):
    """Let the message leave the group, its body kept or not."""

    attempts: int
    cause: DeathCause
    reason: str
    keep: bool


Verdict = Wait | Park | Bury


def verdict_of(
    error: BaseException, rules: RetryRules, *, before: int, failing_s: float, share: float, parked: bool, text: str
) -> Verdict:
    """Return what becomes of a message.

    `before`: its failed attempts before this one; `failing_s`: since when it fails here; `share`: a random number from
    0 to 1; `parked`: whether its key is parked; `text`: the error as it may be kept.
    """
    if isinstance(error, Skip):
        return Bury(before, "skipped", text, keep=False)
    if isinstance(error, PauseKey):
        short = failing_s + error.seconds <= IN_PLACE_S
        return _waiting(before, "paused", error.seconds, in_place=short and not parked)
    attempts = before + 1
    final = isinstance(error, Reject) or rules.is_final(error)
    if final or attempts >= rules.attempt_limit:
        return _ended(attempts, "rejected" if final else "exhausted", rules, text, parked=parked)
    wait_s = error.seconds if isinstance(error, RetryLater) else rules.wait_s(attempts, share)
    short = failing_s + wait_s <= IN_PLACE_S or rules.policy == "block"
    return _waiting(attempts, "retry", wait_s, in_place=short and not parked)


def _waiting(attempts: int, cause: ParkCause, wait_s: float, *, in_place: bool) -> Verdict:
    return Wait(attempts, wait_s) if in_place else Park(attempts, cause, wait_s)


def _ended(attempts: int, cause: DeathCause, rules: RetryRules, text: str, *, parked: bool) -> Verdict:
    """There are no further attempts: the group's policy decides."""
    match rules.policy:
        case "block":
            # For ever, and where it is: whoever chose this wants nothing to pass.
            wait_s = rules.backoff_s[-1]
            return Park(attempts, "retry", wait_s, blocked=True) if parked else Wait(attempts, wait_s, blocked=True)
        case "dead_letter":
            return Bury(attempts, cause, text, keep=True)
        case "skip":
            return Bury(attempts, "skipped", text, keep=False)
        case "park":
            return Park(attempts, "rejected" if cause == "rejected" else "exhausted", None)
