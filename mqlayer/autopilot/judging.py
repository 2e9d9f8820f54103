"""Did a change help? Pure rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from mqlayer.autopilot.auto_topics import AutoPartition, AutoTopic
from mqlayer.autopilot.loads import BACKLOG_LEAST, Times

SHARE_SLACK: Final = 0.2
"""A successor may have so much more of the load than foretold."""
GONE_BELOW: Final = 0.25
"""Less of the earlier load says nothing about a split."""
SERVED_MORE: Final = 1.1
UNHELPFUL_LIMIT: Final = 2
"""So many changes in a row that do not help stop the autopilot: one may be a hot spot that moved on."""
FAILED_LIMIT: Final = 3


class ChangeToJudge(NamedTuple):
    """A change of the autopilot that ended. `ago_s`: since it is in force; `facts`: as noted before it."""

    decision_id: int
    change_id: int
    kind: str
    facts: Mapping[str, Any]
    state: str
    ago_s: float | None
    drained: bool
    successors: Sequence[int]


class Judgement(NamedTuple):
    """`helped`: None where nothing tells."""

    helped: bool | None
    reason: str
    facts: Mapping[str, Any] = {}


def facts_before(topic: AutoTopic, parents: Sequence[AutoPartition], share: float) -> dict[str, Any]:
    """Return what a judgement needs to know of the time before."""
    return {
        "per_s": round(sum(one.per_s for one in parents), 1),
        "heaviest_per_s": round(max(one.per_s for one in parents), 1),
        "share": round(share, 3),
        "lag": topic.lag,
        "served_per_s": round(topic.served_per_s, 1),
        "capacity_per_s": round(topic.capacity_per_s, 1),
        "partitions": len(topic.partitions),
    }


def judge(topic: AutoTopic, change: ChangeToJudge, times: Times) -> Judgement | None:
    """Return how a change ended, None where it is too early to tell."""
    if change.state == "dropped":
        return Judgement(None, "it was dropped")
    if change.state != "done" or change.ago_s is None or change.ago_s < times.settle_s:
        return None
    made = [topic.at_partition(number) for number in change.successors]
    parts = [one for one in made if one is not None]
    if len(parts) < len(made):
        return Judgement(None, "its partitions changed again")
    if any(one.figures.per_s is None for one in parts):
        return None if change.ago_s < times.drain_s else Judgement(None, "its partitions could not be measured")
    if not change.drained and change.ago_s < times.drain_s:
        return None
    return _judged(topic, change, parts)


def stop_reason(judgement: Judgement, unhelpful: int) -> str:
    """Return why the autopilot stops itself after so many changes in a row that did not help, '' if it goes on."""
    if judgement.helped is not False or unhelpful < UNHELPFUL_LIMIT:
        return ""
    return f"{unhelpful} changes in a row did not help: {judgement.reason}"


def _judged(topic: AutoTopic, change: ChangeToJudge, parts: Sequence[AutoPartition]) -> Judgement:
    all_per_s, heaviest_per_s = sum(one.per_s for one in parts), max(one.per_s for one in parts)
    after = {
        "after_per_s": round(all_per_s, 1),
        "after_heaviest_per_s": round(heaviest_per_s, 1),
        "after_lag": topic.lag,
        "after_served_per_s": round(topic.served_per_s, 1),
    }
    if change.kind != "split":
        return Judgement(True, f"{all_per_s:,.0f} messages/s after it", after)
    if all_per_s < GONE_BELOW * float(change.facts["per_s"]):
        return Judgement(None, "the load went away by itself", after)
    share, foretold = heaviest_per_s / all_per_s if all_per_s else 0.0, float(change.facts["share"])
    if share > foretold + SHARE_SLACK:
        return Judgement(False, f"one successor has {share:.0%} of the load, {foretold:.0%} were foretold", after)
    return _lag_judged(topic, change, share, after)


def _lag_judged(topic: AutoTopic, change: ChangeToJudge, share: float, after: Mapping[str, Any]) -> Judgement:
    lag, served = int(change.facts["lag"]), float(change.facts["served_per_s"])
    was_behind = lag > max(BACKLOG_LEAST, served)
    if was_behind and topic.lag >= lag and topic.served_per_s < SERVED_MORE * served:
        reason = (
            f"the lag was {lag:,} messages and is {topic.lag:,}, and no more are handled "
            f"({served:,.0f} and {topic.served_per_s:,.0f} per second): members or handlers are missing, not partitions"
        )
        return Judgement(False, reason, after)
    return Judgement(True, f"the heaviest successor has {share:.0%} of the load", after)
