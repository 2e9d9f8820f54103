"""Rows that relays quarantined because they can never be sent, for operators.

In a strict topic such a row holds its LP: what is behind it may not pass. In a best_effort topic a void record takes
its place, so that the LP goes on, and the row is kept under a number of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from mqlayer.domain.names import check_name
from mqlayer.errors import InvalidInput, NotFound
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """A row quarantined. `topic` is None where the outbox does not know the topic's id.

    `number`: of a row of a best_effort topic, which was passed over; None for one that holds its LP.
    """

    topic_id: int
    topic: str | None
    lp: int
    seq: int
    reason: str
    quarantined_at: datetime
    number: int | None = None


def list_quarantined(application: Database) -> list[QuarantinedRow]:
    """Return all rows quarantined, those that hold their LP first; each kind by topic and LP."""
    with application.connection() as connection:
        rows = [query("quarantined_list"), query("voided_list")]
        return [QuarantinedRow(*row) for statement in rows for row in connection.execute(statement).fetchall()]


def retry_quarantined(
    application: Database, *, topic: str | None = None, lp: int | None = None
) -> list[QuarantinedRow]:
    """Let relays try LPs again whose row was quarantined, and publish anew what was passed over, at the end of its LP.

    Of a topic, of one LP of it, or all; returns which. A row that still can't be sent is quarantined again at once,
    with its reason. Raises KeyTooLarge, BodyTooLarge and their kind where one that was passed over is as it was: repair
    it first (`mqlayer_app.voided`), or discard it; those before it are published.
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


def discard_quarantined(application: Database, number: int) -> None:
    """Let a row go that was passed over: its message is gone, that it was discarded stays on record.

    Raises NotFound where no such row waits.
    """
    if not application.transaction(partial(_end, number=number, ended="discarded")):
        raise NotFound("row that was passed over", number, "see `mqlayer outbox quarantine list`")


def _retry(application: Database, row: QuarantinedRow) -> bool:
    if row.number is not None:
        return application.transaction(partial(_end, number=row.number, ended="published", act=_publish))
    with application.connection() as connection:
        connection.execute(query("quarantined_remove"), {"topic_id": row.topic_id, "lp": row.lp})
    return True


def _end(
    connection: Connection, *, number: int, ended: str, act: Callable[[Connection, int, str], None] | None = None
) -> bool:
    """Decide on a row that was passed over, unless somebody did; say whether it is ours to decide."""
    locked = connection.execute(query("voided_hold"), {"id": number}).fetchone()
    if locked is None:
        return False
    if act is not None:
        act(connection, number, locked[0])
    connection.execute(query("voided_end"), {"id": number, "ended": ended})
    return True


def _publish(connection: Connection, number: int, topic: str) -> None:
    connection.execute(query("voided_publish"), {"id": number, "topic": topic})
