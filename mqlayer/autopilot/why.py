"""Reasons for which a topic's routes change by themselves, or stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mqlayer.autopilot.auto_topics import AutoCluster, AutoPartition, AutoTopic
from mqlayer.autopilot.budgets import budget_left
from mqlayer.autopilot.journal import RouteDecision, decisions_of
from mqlayer.autopilot.loads import TIMES, Times
from mqlayer.autopilot.measuring import read_auto_topics
from mqlayer.autopilot.policy import PolicyState, RoutePolicy, capacity_of
from mqlayer.autopilot.rules import RULES, SPLIT_ABOVE, decide
from mqlayer.autopilot.verdicts import AutoRule, Proposal, RefusedChange, Verdict
from mqlayer.errors import NotFound
from mqlayer.runtime.route_cache import load_route
from mqlayer.runtime.runtime import Runtime

JOURNALED: Final = 50
"""Decisions among which a refusal is looked for."""
RECENT_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """A partition's load, and what follows. `load`: part of its capacity; `peak_per_s`: highest in five minutes."""

    partition: int
    lp_from: int
    lp_to: int
    node: str
    per_s: float | None
    peak_per_s: float
    load: float | None
    lag: int
    verdict: str
    reason: str


@dataclass(frozen=True, slots=True)
class RouteReport:
    """A topic's policy, state, partitions and last decisions. `waits`: why a wanted change is not made now."""

    topic: str
    policy: RoutePolicy
    state: PolicyState
    capacity_per_s: float
    capacity_from: str
    changes_left: int
    waits: str
    partitions: Sequence[PartitionReport]
    decisions: Sequence[RouteDecision]


def explain_routes(runtime: Runtime, topic: str, *, last: int = 10, times: Times = TIMES) -> RouteReport:
    """Return what the autopilot knows of a topic. Raises NotFound without a policy."""
    topics, cluster = read_auto_topics(runtime, times, topic)
    if not topics:
        load_route(runtime.control, topic)
        raise NotFound("policy of topic", topic, f"its routes are changed by hand: mqlayer route auto {topic} --report")
    known = decisions_of(runtime.control, topic, limit=max(last, JOURNALED))
    return replace(report_of(topics[0], cluster, known), decisions=known[:last])


def report_of(
    topic: AutoTopic, cluster: AutoCluster, decisions: Sequence[RouteDecision] = (), rules: Sequence[AutoRule] = RULES
) -> RouteReport:
    """Return the report of a topic. Pure."""
    verdicts = _by_partition(verdict for rule in rules for verdict in rule(topic, cluster))
    names = {node.node: node.name for node in cluster.nodes}
    capacity_per_s, source = capacity_of(topic.policy, topic.state)
    refused = {one.partitions[0]: one.reason for one in reversed(decisions) if _is_refusal(topic, one)}
    parts = [
        _partition(topic, one, names.get(one.node, ""), _known(verdicts.get(one.partition), refused.get(one.partition)))
        for one in topic.partitions
    ]
    waits = decide(topic, cluster, rules).waits
    return RouteReport(
        topic.topic, topic.policy, topic.state, capacity_per_s, source, budget_left(topic), waits, parts, decisions
    )


def _by_partition(verdicts: Iterable[Verdict]) -> Mapping[int, Verdict]:
    found: dict[int, Verdict] = {}
    for verdict in verdicts:
        for partition in verdict.partitions:
            found.setdefault(partition, verdict)
    return found


def _is_refusal(topic: AutoTopic, one: RouteDecision) -> bool:
    recent = topic.at is not None and (topic.at - one.at).total_seconds() < RECENT_S
    return one.verdict == "refused" and recent


def _known(verdict: Verdict | None, reason: str | None) -> Verdict | None:
    """Return a verdict, or the refusal that the last sample of its LPs led to."""
    if reason is None or verdict is None or (isinstance(verdict, Proposal) and verdict.points):
        return verdict
    return RefusedChange(verdict.kind, verdict.partitions, reason)


def _partition(topic: AutoTopic, one: AutoPartition, node: str, verdict: Verdict | None) -> PartitionReport:
    word, reason = _words(one, verdict)
    load = None if one.figures.per_s is None else one.per_s / topic.capacity_per_s
    return PartitionReport(
        one.partition, one.lp_from, one.lp_to, node, one.figures.per_s, one.figures.peak_per_s, load,
        one.figures.lag, word, reason,
    )  # fmt: skip


def _words(one: AutoPartition, verdict: Verdict | None) -> tuple[str, str]:
    if isinstance(verdict, Proposal):
        return f"{verdict.kind} wanted", verdict.reason
    if verdict is not None:
        return f"{verdict.kind} refused", verdict.reason
    if one.figures.per_s is None:
        return "unknown", "not measured for a whole window yet"
    if not one.figures.is_whole:
        return "fine", f"below {SPLIT_ABOVE:.0%}; too new to merge"
    return "fine", f"below {SPLIT_ABOVE:.0%}; no neighbour that is cold enough to merge with"
