"""Budgets, cool-downs and bounds: pure rules."""

from __future__ import annotations

from typing import Final

from mqlayer.autopilot.auto_topics import AutoTopic, PastChange
from mqlayer.autopilot.policy import format_quiet, is_quiet
from mqlayer.autopilot.verdicts import Proposal

ACTOR: Final = "autopilot"
HOUR_S: Final = 3_600.0


def waits_for(topic: AutoTopic) -> str:
    """Return why no change of the topic may begin now, '' where one may."""
    if topic.state.stopped_at is not None:
        return f"it stopped itself: {topic.state.stopped_because}"
    open_change = next((one for one in topic.changes if one.is_open), None)
    if open_change is not None:
        return f"change {open_change.change_id} is open"
    if is_quiet(topic.policy.quiet, topic.minute):
        return f"quiet hours, {format_quiet(topic.policy.quiet)} UTC"
    left_s = cool_down_left(topic)
    if left_s > 0:
        return f"cool-down, {left_s:.0f} s more"
    if budget_left(topic) < 1:
        return f"the {topic.policy.changes_per_hour} changes of this hour are made"
    return ""


def bound_by(topic: AutoTopic, wanted: Proposal) -> str:
    """Return the bound that forbids a change, '' for none."""
    count = len(topic.partitions) + wanted.grows_by
    if count > topic.policy.max_partitions and wanted.grows_by > 0:
        return f"the topic would have {count} partitions, {topic.policy.max_partitions} are allowed"
    if count < topic.policy.min_partitions and wanted.grows_by < 0:
        return f"the topic would have {count} partitions, it keeps at least {topic.policy.min_partitions}"
    if wanted.kind == "move":
        for number in wanted.partitions:
            rests_s = rest_left(topic, number)
            if rests_s > 0:
                return f"partition {number} moved lately, it rests for {rests_s:.0f} s more"
    return ""


def budget_left(topic: AutoTopic) -> int:
    """Changes left to this hour."""
    made = sum(_counts(one) and one.ago_s < HOUR_S for one in topic.changes)
    return max(0, topic.policy.changes_per_hour - made)


def cool_down_left(topic: AutoTopic) -> float:
    """Seconds until the next change may begin; anyone's change counts."""
    last_s = min((one.ago_s for one in topic.changes if one.state != "dropped"), default=float("inf"))
    return max(0.0, topic.policy.cool_down_s - last_s)


def rest_left(topic: AutoTopic, partition: int) -> float:
    """Seconds until a partition may move again: since the change that made it."""
    since_s = [one.ago_s for one in topic.changes if partition in one.successors]
    return max(0.0, topic.policy.rest_s - min(since_s, default=float("inf")))


def _counts(change: PastChange) -> bool:
    return change.actor == ACTOR and change.state != "dropped"
