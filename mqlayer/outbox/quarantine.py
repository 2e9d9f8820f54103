"""Outbox rows that can never be sent: the page 'Operate the outbox'.

A strict topic's row blocks its LP. A best-effort topic's row is replaced by a void record and kept under a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Literal

from mqlayer.arguments import explain
from mqlayer.domain.names import check_name
from mqlayer.errors import InvalidInput, NotFound
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """A quarantined row. No `topic`: unknown id. No `number`: it blocks its LP."""

    topic_id: int
    topic: str | None
    lp: int
    seq: int
    reason: str
    quarantined_at: datetime
    number: int | None = None


@explain
def list_quarantined(application: Database, *, limit: int | None = None) -> list[QuarantinedRow]:
    """Return quarantined rows, blocking ones first, at most `limit` of each kind."""
    with application.connection() as connection:
        return [
            QuarantinedRow(*row)
            for statement in (query("quarantined_list"), query("voided_list"))
            for row in connection.execute(statement, {"limit": limit}).fetchall()
        ]


@explain
def retry_quarantined(
    application: Database, *, topic: str | None = None, lp: int | None = None
) -> list[QuarantinedRow]:
    """Unblock LPs and publish replaced rows at their LPs' ends, of all, a topic or an LP; return the rows.

    Rows still unfit are quarantined again. Raises KeyTooLarge, BodyTooLarge or their kind for an unfit replaced row,
    after publishing earlier ones: repair it (`mqlayer_app.voided`) or discard it.
    """
    if topic is not None:
        check_name("topic", topic)
    elif lp is not None:
        raise InvalidInput("an LP needs its topic")
    chosen = [
        row
        for row in list_quarantined(application)
        if (topic is None or row.topic == topic) and (lp is None or row.lp == lp)
    ]
    return [row for row in chosen if _retry(application, row)]


@explain
def discard_quarantined(application: Database, number: int) -> None:
    """Discard a replaced row's message; the row records that. Raises NotFound."""
    if not application.transaction(partial(_end, number=number, ended="discarded")):
        raise NotFound("row that was passed over", number, "see `mqlayer outbox quarantine list`")


def audit_quarantine(control: Database, actor: str, act: Literal["retry", "discard"], **facts: Any) -> None:
    """Write an audit row before an operator's act: the outbox may be in another database."""
    target, named = str(facts.get("topic") or "outbox"), {name: one for name, one in facts.items() if one is not None}
    control.transaction(lambda connection: write_audit(connection, actor, f"outbox {act}", target, named))


def _retry(application: Database, row: QuarantinedRow) -> bool:
    if row.number is not None:
        return application.transaction(partial(_end, number=row.number, ended="published", act=_publish))
    with application.connection() as connection:
        connection.execute(query("quarantined_remove"), {"topic_id": row.topic_id, "lp": row.lp})
    return True


def _end(
    connection: Connection, *, number: int, ended: str, act: Callable[[Connection, int, str], None] | None = None
) -> bool:
    locked = connection.execute(query("voided_hold"), {"id": number}).fetchone()
    if locked is None:
        return False
    if act is not None:
        act(connection, number, locked[0])
    connection.execute(query("voided_end"), {"id": number, "ended": ended})
    return True


def _publish(connection: Connection, number: int, topic: str) -> None:
    connection.execute(query("voided_publish"), {"id": number, "topic": topic})
