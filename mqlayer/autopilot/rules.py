"""Rules by which routes change: pure. `RULES` has them in the order of their urgency.

A rule of another kind is a function of the same shape in a module of its own, and an entry of `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from mqlayer.autopilot.auto_topics import AutoCluster, AutoPartition, AutoTopic, HotKey, LpLoads
from mqlayer.autopilot.budgets import bound_by, waits_for
from mqlayer.autopilot.loads import TIMES, LoadFigures
from mqlayer.autopilot.node_moves import shed_nodes
from mqlayer.autopilot.verdicts import AutoDecision, AutoRule, Proposal, RefusedChange, Verdict
from mqlayer.domain.route_changes import halving_point
from mqlayer.domain.split_points import part_loads

SPLIT_ABOVE: Final = 0.7
MERGE_BELOW: Final = 0.35
"""Half of the other: a merge of what a split made would need half of the load to go."""
MOST_OF_ONE: Final = 0.5
"""An LP or a key with more than this share is not divided further."""
REST_LEAST: Final = 0.1
"""Isolating an LP helps others with this share at least."""
SAMPLED_LEAST: Final = 20
"""Fewer messages in a sample say nothing about a middle."""
SAMPLED_PARTITIONS: Final = 4


def hot_partitions(topic: AutoTopic) -> list[AutoPartition]:
    """Return partitions above SPLIT_ABOVE of their capacity for a window, the hottest first."""
    limit = SPLIT_ABOVE * topic.capacity_per_s
    hot = [one for one in topic.partitions if one.per_s > limit]
    return sorted(hot, key=lambda one: (-one.per_s, one.lp_from))


def partitions_to_sample(topic: AutoTopic, again_s: float = TIMES.again_s) -> list[AutoPartition]:
    """Return the hot partitions whose LPs a split has to know; none while no change may begin."""
    if topic.paused or waits_for(topic):
        return []
    due = [one for one in hot_partitions(topic) if one.sampled_ago_s is None or one.sampled_ago_s >= again_s]
    return due[:SAMPLED_PARTITIONS]


def split_hot(topic: AutoTopic, _: AutoCluster) -> Iterator[Verdict]:
    """Split hot partitions at the middle of their load; isolate an LP that has most of it."""
    for one in hot_partitions(topic):
        yield _split(topic, one)


def _split(topic: AutoTopic, one: AutoPartition) -> Verdict:
    heat = f"{one.per_s:,.0f} messages/s, {one.per_s / topic.capacity_per_s:.0%} of its capacity"
    if one.lp_to - one.lp_from < 2:
        return _single(one, heat)
    loads = one.loads
    if loads is None or loads.total < SAMPLED_LEAST:
        return Proposal("split", (one.partition,), f"{heat}; its LPs are not sampled yet")
    hottest, messages = max(loads.per_lp.items(), key=lambda item: (item[1], -item[0]))
    if messages > MOST_OF_ONE * loads.total:
        return _isolate(one, loads, hottest, heat)
    point = halving_point(loads.per_lp, one.lp_from, one.lp_to)
    parts = part_loads(loads.per_lp, one.lp_from, one.lp_to, [point])
    reason = f"{heat}; LP {point} halves its load"
    return Proposal("split", (one.partition,), reason, (point,), share=max(parts) / sum(parts))


def _isolate(one: AutoPartition, loads: LpLoads, lp: int, heat: str) -> Verdict:
    key, share = _key_of(one, lp), loads.per_lp[lp] / loads.total
    rest = (loads.total - loads.per_lp[lp]) / loads.total
    named = (
        f"key {key.key!r} of LP {lp} has {key.share:.0%} of its load" if key else f"LP {lp} has {share:.0%} of its load"
    )
    if rest < REST_LEAST:
        reason = f"{heat}; {named}, so no split helps: {_advice(key)}"
        return RefusedChange("split", (one.partition,), reason, key.key if key else None, lp, alarm=True)
    points = tuple(at for at in (lp, lp + 1) if one.lp_from < at < one.lp_to)
    return Proposal(
        "split", (one.partition,), f"{heat}; {named}: a partition of its own frees the others", points, share=share
    )


def _single(one: AutoPartition, heat: str) -> RefusedChange:
    key = _key_of(one, one.lp_from)
    named = f" of key {key.key!r}" if key else ""
    reason = f"{heat}; it is the single LP {one.lp_from}{named}, so no split helps: {_advice(key)}"
    return RefusedChange("split", (one.partition,), reason, key.key if key else None, one.lp_from, alarm=True)


def _key_of(one: AutoPartition, lp: int) -> HotKey | None:
    key = one.loads.hot_key if one.loads else None
    return key if key is not None and key.lp == lp and key.share > MOST_OF_ONE else None


def _advice(key: HotKey | None) -> str:
    return "divide the key, or handle it faster" if key else "handle it faster, or publish under other keys"


def merge_cold(topic: AutoTopic, _: AutoCluster) -> Iterator[Verdict]:
    """Merge neighbours on one node that were cold together over the whole look back, the coldest first."""
    limit = MERGE_BELOW * topic.capacity_per_s
    pairs = [pair for pair in pairwise(topic.partitions) if _may_merge(pair) and _peak(pair) < limit]
    for pair in sorted(pairs, key=lambda pair: (_peak(pair), pair[0].lp_from)):
        heat = (
            f"at most {_peak(pair):,.0f} messages/s together, {_peak(pair) / topic.capacity_per_s:.0%} of a partition"
        )
        yield Proposal("merge", tuple(one.partition for one in pair), heat)


def _may_merge(pair: Sequence[AutoPartition]) -> bool:
    return pair[0].node == pair[1].node and all(
        _is_watched(one.figures) and not one.draining and one.figures.lag <= max(100.0, one.per_s) for one in pair
    )


def _is_watched(figures: LoadFigures) -> bool:
    return figures.per_s is not None and figures.is_whole


def _peak(pair: Sequence[AutoPartition]) -> float:
    return sum(one.figures.peak_per_s for one in pair)


RULES: Final[tuple[AutoRule, ...]] = (split_hot, shed_nodes, merge_cold)


def decide(topic: AutoTopic, cluster: AutoCluster, rules: Sequence[AutoRule] = RULES) -> AutoDecision:
    """Return the first change that rules want and bounds allow; never one while `waits_for` has a reason."""
    refused: list[RefusedChange] = []
    wanted: Proposal | None = None
    waits = waits_for(topic) or ("the topic is paused" if topic.paused else "")
    why = ""
    for verdict in (verdict for rule in rules for verdict in rule(topic, cluster)):
        if isinstance(verdict, RefusedChange):
            refused.append(verdict)
            continue
        held = waits or bound_by(topic, verdict) or ("" if _is_whole(verdict) else "its LPs are not sampled yet")
        if not held:
            return AutoDecision(verdict, verdict, "", tuple(refused))
        if wanted is None:
            wanted, why = verdict, held
    return AutoDecision(None, wanted, why, tuple(refused))


def decide_by_samples(
    topic: AutoTopic,
    cluster: AutoCluster,
    rules: Sequence[AutoRule],
    again_s: float,
    sample: Callable[[AutoTopic, Sequence[AutoPartition]], AutoTopic],
) -> tuple[AutoTopic, AutoDecision]:
    """Decide once `sample` counted the LPs of the partitions that a split has to know; return the topic with these."""
    candidates = partitions_to_sample(topic, again_s)
    if candidates:
        topic = sample(topic, candidates)
    return topic, decide(topic, cluster, rules)


def _is_whole(wanted: Proposal) -> bool:
    return wanted.kind != "split" or bool(wanted.points)
