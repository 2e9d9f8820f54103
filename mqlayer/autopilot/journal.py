"""The autopilot's journal in Postgres."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from psycopg.types.json import Jsonb

from mqlayer.autopilot.auto_topics import AutoTopic
from mqlayer.autopilot.budgets import ACTOR
from mqlayer.autopilot.judging import ChangeToJudge
from mqlayer.autopilot.verdicts import Proposal, RefusedChange
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query

JOURNAL_ROWS: Final = 500
"""Decisions that are kept per topic."""
JOURNAL_S: Final = 30 * 86_400.0
AGAIN_S: Final = 600.0
"""The same decision is noted again after this time."""


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """A row of the journal. `took_s`: from the plan to the end of its change."""

    decision_id: int
    at: datetime
    verdict: str
    kind: str
    partitions: Sequence[int]
    reason: str
    key: str | None
    lp: int | None
    change_id: int | None
    facts: Mapping[str, Any]
    judged_at: datetime | None
    helped: bool | None
    state: str | None
    took_s: float | None


def note_change(
    connection: Connection, topic: AutoTopic, chosen: Proposal, change_id: int, facts: Mapping[str, Any]
) -> None:
    """Note a change in the transaction that plans it."""
    row = _row(topic, "changed", chosen.kind, chosen.partitions, chosen.reason) | {"facts": Jsonb(facts)}
    connection.execute(query("decision_insert"), row | {"change_id": change_id})


def note_verdict(
    database: Database, topic: AutoTopic, verdict: str, of: Proposal | RefusedChange, facts: Mapping[str, Any]
) -> None:
    """Note a decision that changes nothing; not again within AGAIN_S."""
    row = _row(topic, verdict, of.kind, of.partitions, of.reason) | {"facts": Jsonb(facts), "again_s": AGAIN_S}
    if isinstance(of, RefusedChange):
        row |= {"key": of.key, "lp": of.lp}
    with database.connection() as connection:
        if connection.execute(query("decision_insert_new"), row).rowcount:
            _clean(connection, topic)


def _row(topic: AutoTopic, verdict: str, kind: str, partitions: Sequence[int], reason: str) -> dict[str, Any]:
    return {
        "topic_id": topic.topic_id, "verdict": verdict, "kind": kind, "partitions": list(partitions),
        "reason": reason, "key": None, "lp": None, "change_id": None, "facts": Jsonb({}),
    }  # fmt: skip


def stop_topic(connection: Connection, topic: AutoTopic, reason: str) -> None:
    """Stop the autopilot for a topic, until an operator turns it on again."""
    stopped = connection.execute(query("policy_stop"), {"topic_id": topic.topic_id, "reason": reason})
    if stopped.rowcount:
        connection.execute(query("decision_insert"), _row(topic, "stopped", "none", (), reason))
        write_audit(connection, ACTOR, "route auto stop", topic.topic, {"reason": reason})


def clean_journal(database: Database, topic: AutoTopic) -> None:
    """Forget old decisions of a topic."""
    with database.connection() as connection:
        _clean(connection, topic)


def _clean(connection: Connection, topic: AutoTopic) -> None:
    facts = {"topic_id": topic.topic_id, "kept_s": JOURNAL_S, "rows": JOURNAL_ROWS}
    connection.execute(query("decisions_clean"), facts)


def changes_to_judge(database: Database, topics: Sequence[AutoTopic]) -> dict[int, list[ChangeToJudge]]:
    """Return the autopilot's changes without a judgement, by topic."""
    found: dict[int, list[ChangeToJudge]] = {}
    with database.connection() as connection:
        wanted = {"topics": [topic.topic_id for topic in topics]}
        for topic_id, *facts in connection.execute(query("decisions_unjudged"), wanted):
            found.setdefault(topic_id, []).append(ChangeToJudge(*facts))
    return found


def decisions_of(database: Database, topic: str, *, limit: int = 10) -> list[RouteDecision]:
    """Return a topic's last decisions, the newest first."""
    with database.connection() as connection:
        rows = connection.execute(query("decisions_of"), {"topic": topic, "limit": limit}).fetchall()
    return [RouteDecision(*row) for row in rows]
