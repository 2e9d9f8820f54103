"""Checks of what the control schema says: periodic jobs, route changes, groups."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from mqlayer.checking.findings import Check, Finding, Limits, Verdict, shown_s
from mqlayer.checking.postgres import AskedDatabase
from mqlayer.domain.routing import NodeId
from mqlayer.redis.nodes import Node

START_BEAT: Final = "run one: celery -A mqlayer.workers.app worker --beat (a second one does no harm)"


def registered_nodes(asked: AskedDatabase) -> list[tuple[Node, datetime | None]]:
    """Return all nodes, and since when each is given up."""
    return [
        (Node(NodeId(node_id), name, url, run_id), lost_at)
        for node_id, name, url, run_id, lost_at in asked.rows("check_nodes")
    ]


def check_beat(asked: AskedDatabase, limits: Limits) -> list[Finding]:
    """Periodic jobs make up for what died, trim, rotate and retire; members join and leave without them."""
    rows = asked.rows("check_jobs")
    if not rows:
        return [Finding("beat", asked.subject, Verdict.WARNING, "no periodic job ever ran", START_BEAT)]
    found = []
    for name, ago_s, due_s, every_s in rows:
        # It may be claimed again a part of its interval early, so that its next run is due some time after that.
        if due_s > every_s + limits.waiting_s:
            seen = f"{name} ran {shown_s(ago_s)} ago, and should have since"
            found.append(Finding("beat", asked.subject, Verdict.BROKEN, seen, f"see worker and beat, or {START_BEAT}"))
    last_s = min(ago_s for _, ago_s, _, _ in rows)
    seen = f"{len(rows)} periodic jobs, none is late, the last ran {shown_s(last_s)} ago"
    return found or [Finding("beat", asked.subject, Verdict.OK, seen)]


def check_changes(asked: AskedDatabase, limits: Limits) -> list[Finding]:
    """Between the seal and the new version, publishers of a change's LPs wait."""
    found = []
    for topic, change_id, kind, state, age_s in asked.rows("check_changes", age_s=limits.waiting_s):
        waits = state != "planned"
        seen = f"{kind} {change_id} of topic {topic} is {state} since {shown_s(age_s)}"
        seen += ": publishers of its LPs may wait" if waits else ""
        fix = f"mqlayer route repair {topic}; it names what it waits for, as a rule a node that is away"
        found.append(Finding("routes", asked.subject, Verdict.BROKEN if waits else Verdict.WARNING, seen, fix))
    return found or [Finding("routes", asked.subject, Verdict.OK, "no route change waits")]


def check_groups(asked: AskedDatabase, _: Limits) -> list[Finding]:
    """What a group has not settled is never trimmed, whether anybody consumes it or not."""
    rows = asked.rows("check_groups")
    found = [
        Finding(
            "groups",
            asked.subject,
            Verdict.WARNING,
            f"group {group} of topic {topic} has no living member, and holds trimming up",
            "start its consumers: mqlayer consume MODULE:APP",
        )
        for topic, group, living in rows
        if not living
    ]
    seen = f"each of {len(rows)} groups has living members" if rows else "no group as yet"
    return found or [Finding("groups", asked.subject, Verdict.OK, seen)]


CHECKS: Final[dict[str, Check[AskedDatabase]]] = {
    "beat": check_beat,
    "routes": check_changes,
    "groups": check_groups,
}
