"""The job that changes routes by itself: measure, judge, decide, change.

A pass may end anywhere, and two may run at once; states and crashes: docs/design/autopilot.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from psycopg.types.json import Jsonb

from mqlayer.autopilot.auto_topics import AutoCluster, AutoPartition, AutoTopic
from mqlayer.autopilot.budgets import ACTOR
from mqlayer.autopilot.journal import (
    changes_to_judge,
    clean_journal,
    note_change,
    note_verdict,
    stop_topic,
)
from mqlayer.autopilot.judging import (
    FAILED_LIMIT,
    ChangeToJudge,
    Judgement,
    facts_before,
    judge,
    stop_reason,
)
from mqlayer.autopilot.loads import TIMES, Times
from mqlayer.autopilot.measuring import note_capacities, read_auto_topics, take_load_samples, with_lp_loads
from mqlayer.autopilot.rules import RULES, decide_by_samples
from mqlayer.autopilot.verdicts import AutoRule, Proposal
from mqlayer.errors import Conflict, InvalidInput, MqlayerError, NotFound
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import Actor
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.routes import ChangePlan, apply_plan, planned_merge, planned_move, planned_split
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics import list_nodes

log = event_logger(__name__)


@dataclass(frozen=True, slots=True)
class AutoPass:
    """What a pass did: changes by topic, and topics that it stopped."""

    topics: int = 0
    changed: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()


def auto_routes(runtime: Runtime, *, times: Times = TIMES, rules: Sequence[AutoRule] = RULES) -> AutoPass:
    """Look at each topic with automatic routes once; change at most one thing of each.

    Costs one query where no topic has them. Raises StoreUnavailable.
    """
    if not take_load_samples(runtime, times):
        return AutoPass()
    topics, cluster = read_auto_topics(runtime, times)
    topics = note_capacities(runtime.control, topics)
    stopped = [topic.topic for topic in _judge_all(runtime, topics, times)]
    changed: list[str] = []
    for topic in topics:
        made = None if topic.topic in stopped else _act(runtime, topic, cluster, times, rules)
        if made is not None:
            changed.append(topic.topic)
        if made is not None and made.kind == "move":
            # The loads of nodes that others would go by are of before it.
            cluster = replace(cluster, last_move_ago_s=0.0)
    return AutoPass(len(topics), tuple(changed), tuple(stopped))


def _judge_all(runtime: Runtime, topics: Sequence[AutoTopic], times: Times) -> list[AutoTopic]:
    """Judge the changes that are due; return the topics that stopped."""
    waiting = changes_to_judge(runtime.control, topics)
    return [
        topic for topic in topics if any(_judge(runtime, topic, one, times) for one in waiting.get(topic.topic_id, ()))
    ]


def _judge(runtime: Runtime, topic: AutoTopic, change: ChangeToJudge, times: Times) -> bool:
    judgement = judge(topic, change, times)
    return judgement is not None and runtime.control.transaction(
        lambda connection: _note_judgement(connection, topic, change, judgement)
    )


def _note_judgement(connection: Connection, topic: AutoTopic, change: ChangeToJudge, judgement: Judgement) -> bool:
    facts = dict(judgement.facts) | {"judgement": judgement.reason}
    put = {"decision_id": change.decision_id, "helped": judgement.helped, "facts": Jsonb(facts)}
    if not connection.execute(query("decision_judge"), put).rowcount:
        return False
    counted = {None: "keep", True: "reset", False: "add"}[judgement.helped]
    failed = "reset" if change.state == "done" else "keep"
    unhelpful = _count(connection, topic, failed=failed, unhelpful=counted)[1]
    said = {"topic": topic.topic, "change": change.change_id, "helped": judgement.helped, "reason": judgement.reason}
    log.info("route_change_judged", extra=said)
    failpoint("auto.before_judge_commit")
    reason = stop_reason(judgement, unhelpful)
    if reason:
        _stop(connection, topic, reason)
    return bool(reason)


def _count(connection: Connection, topic: AutoTopic, *, failed: str, unhelpful: str = "keep") -> tuple[int, int]:
    facts = {"topic_id": topic.topic_id, "failed": failed, "unhelpful": unhelpful}
    row = connection.execute(query("policy_counts_put"), facts).fetchone()
    return (0, 0) if row is None else (row[0], row[1])


def _stop(connection: Connection, topic: AutoTopic, reason: str) -> None:
    stop_topic(connection, topic, reason)
    log.warning("autopilot_stopped", extra={"topic": topic.topic, "reason": reason})


def _act(
    runtime: Runtime, topic: AutoTopic, cluster: AutoCluster, times: Times, rules: Sequence[AutoRule]
) -> Proposal | None:
    """Decide and change; return the change."""
    topic, decision = decide_by_samples(
        topic, cluster, rules, times.again_s, lambda whole, parts: with_lp_loads(runtime, whole, parts, times)
    )
    sampled = {one.partition for one in topic.partitions if one.loads is not None}
    for refused in (one for one in decision.refused if sampled & {*one.partitions}):
        note_verdict(runtime.control, topic, "refused", refused, _facts_of(topic, refused.partitions, 1.0))
    chosen = decision.chosen
    if chosen is None:
        return None
    if topic.policy.mode != "on":
        note_verdict(runtime.control, topic, "reported", chosen, _facts_of(topic, chosen.partitions, chosen.share))
        return None
    failpoint("auto.before_plan")
    return chosen if _change(runtime, topic, chosen) else None


def _facts_of(topic: AutoTopic, partitions: Iterable[int], share: float) -> dict[str, Any]:
    known = [topic.at_partition(number) for number in partitions]
    parents: list[AutoPartition] = [one for one in known if one is not None]
    return facts_before(topic, parents, share) if parents else {}


def _change(runtime: Runtime, topic: AutoTopic, chosen: Proposal) -> bool:
    here = replace(runtime, actor=Actor(ACTOR, chosen.reason))
    facts = _facts_of(topic, chosen.partitions, chosen.share)

    def note(connection: Connection, change_id: int) -> None:
        note_change(connection, topic, chosen, change_id, facts)

    try:
        apply_plan(here, _planned(here, topic, chosen), note=note)
    except (Conflict, InvalidInput, NotFound) as error:
        # Another process changed the route, or drives the change.
        log.info("route_change_left", extra={"topic": topic.topic, "kind": chosen.kind, "reason": str(error)})
        return False
    except MqlayerError as error:
        _note_failure(runtime, topic, chosen, error)
        return False
    clean_journal(runtime.control, topic)
    return True


def _planned(runtime: Runtime, topic: AutoTopic, chosen: Proposal) -> ChangePlan:
    name, version, first = topic.topic, topic.version, chosen.partitions[0]
    if chosen.kind == "split":
        return planned_split(runtime, name, first, at=chosen.points, if_version=version)
    if chosen.kind == "merge":
        return planned_merge(runtime.control, name, chosen.partitions, if_version=version)
    known = {node.node_id: node.name for node in list_nodes(runtime.control)}
    return planned_move(
        runtime.control, name, first, to=known[chosen.node] if chosen.node else None, if_version=version
    )


def _note_failure(runtime: Runtime, topic: AutoTopic, chosen: Proposal, error: MqlayerError) -> None:
    log.warning("route_change_failed", extra={"topic": topic.topic, "kind": chosen.kind, "reason": str(error)})
    note_verdict(runtime.control, topic, "failed", replace(chosen, reason=str(error)[:1_000]), {})

    def work(connection: Connection) -> None:
        failed = _count(connection, topic, failed="add")[0]
        if failed >= FAILED_LIMIT:
            _stop(connection, topic, f"{failed} changes in a row failed, the last one: {error}"[:1_000])

    runtime.control.transaction(work)
