"""Rows that relays set aside because they can never be sent, for operators."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from mqlayer.domain.names import check_name
from mqlayer.errors import InvalidInput
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query


@dataclass(frozen=True, slots=True)
class AsideRow:
    """A row that holds its LP. `topic` is None where the outbox does not know the topic's id."""

    topic_id: int
    topic: str | None
    lp: int
    seq: int
    reason: str
    set_aside_at: datetime


def list_aside(application: Database) -> list[AsideRow]:
    """Return all rows set aside, by topic and LP."""
    with application.connection() as connection:
        return [AsideRow(*row) for row in connection.execute(query("set_aside_list")).fetchall()]


def retry_aside(application: Database, *, topic: str | None = None, lp: int | None = None) -> list[AsideRow]:
    """Let relays try LPs again whose row was set aside: of a topic, of one LP of it, or all; return which.

    A row that still can't be sent is set aside again at once, with its reason.
    """
    if topic is not None:
        check_name("topic", topic)
    elif lp is not None:
        raise InvalidInput("an LP needs its topic")
    chosen = [
        row for row in list_aside(application) if (topic is None or row.topic == topic) and (lp is None or row.lp == lp)
    ]
    with application.connection() as connection:
        for row in chosen:
            connection.execute(query("set_aside_remove"), {"topic_id": row.topic_id, "lp": row.lp})
    return chosen
