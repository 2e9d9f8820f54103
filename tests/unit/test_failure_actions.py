"""What becomes of a message that fails: where it waits, and for how long."""

from __future__ import annotations

from mqlayer.consuming.engine.failure_actions import IN_PLACE_S, FailureAction, ParkKey, RetryInPlace, failure_action
from mqlayer.domain.retry_rules import RetryRules
from mqlayer.errors import PauseKey


def paused(seconds: float, *, failing_s: float, parked: bool = False) -> FailureAction:
    """Return what becomes of a message whose handler has its key rest."""
    rules = RetryRules()
    return failure_action(PauseKey(seconds), rules, before=3, failing_s=failing_s, share=0.0, parked=parked, text="")


def test_a_key_that_rests_again_and_again_is_parked_as_any_that_waits() -> None:
    """In place it would hold back the trimming of its partition for as long as its handler has it rest."""
    assert paused(4.0, failing_s=0.0) == RetryInPlace(3, 4.0)
    assert paused(4.0, failing_s=IN_PLACE_S - 3.0) == ParkKey(3, "paused", 4.0)
    assert paused(IN_PLACE_S + 1, failing_s=0.0) == ParkKey(3, "paused", IN_PLACE_S + 1)
    assert paused(0.1, failing_s=0.0, parked=True) == ParkKey(3, "paused", 0.1)
