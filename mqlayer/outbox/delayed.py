"""Delayed messages: stored in the caller's transaction, published when due.

A relay or the job `release_delayed` publishes them; that sets their place in order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from mqlayer.arguments import explain
from mqlayer.domain.names import check_name
from mqlayer.errors import InvalidInput
from mqlayer.outbox import django_connections
from mqlayer.outbox.outbox_message import Body, OutboxMessage, message_of, placed
from mqlayer.postgres.caller_connections import Statement, Statements, run, run_async
from mqlayer.postgres.database import Database
from mqlayer.postgres.delayed_release import release_on
from mqlayer.postgres.queries import query

WAIT_MS: Final = 1_000
LONGEST_DELAY_S: Final = 10 * 366 * 86_400


@dataclass(frozen=True, slots=True)
class Delayed:
    """A waiting message. `size`: bytes of its body."""

    delayed_id: int
    topic: str | None
    key: str | None
    lp: int
    due_at: datetime
    created_at: datetime
    size: int


@explain
def publish_delayed(
    connection: Any,
    topic: str,
    *,
    delay_s: float | None = None,
    at: datetime | None = None,
    key: str | None = None,
    body: Body = b"",
    headers: Mapping[str, str] | None = None,
    tags: Sequence[str] = (),
) -> int:
    """Publish after `delay_s` seconds (up to ten years) or `at` a time with zone, if the caller's transaction commits;
    return the number for `cancel_delayed`.

    By the application database's clock. A key's delayed messages follow their times, then numbers. Stored at once,
    without LP lock. Raises as `publish`, and InvalidInput unless exactly one time is given.
    """
    message = _message_of(topic, delay_s, at, key, body, headers, tags)
    connection = _of_alias(connection)
    return run(connection, _publishing(connection, message, delay_s, at))


@explain
async def apublish_delayed(
    connection: Any,
    topic: str,
    *,
    delay_s: float | None = None,
    at: datetime | None = None,
    key: str | None = None,
    body: Body = b"",
    headers: Mapping[str, str] | None = None,
    tags: Sequence[str] = (),
) -> int:
    """As `publish_delayed`, on an async connection."""
    message = _message_of(topic, delay_s, at, key, body, headers, tags)
    return await run_async(connection, _publishing(connection, message, delay_s, at))


@explain
def cancel_delayed(connection: Any, delayed_id: int) -> bool:
    """Cancel a delayed message if the caller's transaction commits; False if none waits."""
    return run(_of_alias(connection), _cancelling(delayed_id))


@explain
async def acancel_delayed(connection: Any, delayed_id: int) -> bool:
    """As `cancel_delayed`, on an async connection."""
    return await run_async(connection, _cancelling(delayed_id))


@explain
def list_delayed(application: Database, *, topic: str | None = None, limit: int = 100) -> list[Delayed]:
    """Return delayed messages, next ones first."""
    if topic is not None:
        check_name("topic", topic)
    with application.connection() as connection:
        rows = connection.execute(query("delayed_list"), {"topic": topic, "limit": limit}).fetchall()
    return [Delayed(*row) for row in rows]


@explain
def release_delayed(application: Database, *, at_most_s: float = 5.0) -> int:
    """Publish due messages; return their number. Safe to run concurrently."""
    until, count = time.monotonic() + at_most_s, 0
    with application.connection() as connection:
        while True:
            released = release_on(connection, wait_ms=WAIT_MS).moved
            count += released
            if not released or time.monotonic() >= until:
                return count


def _publishing(connection: Any, message: OutboxMessage, delay_s: float | None, at: datetime | None) -> Statements[int]:
    message = yield from placed(connection, message)
    facts = message._asdict() | {"delay_s": delay_s, "at": at}
    (delayed_id,) = yield Statement(query("delayed_publish"), facts)
    return int(delayed_id)


def _cancelling(delayed_id: int) -> Statements[bool]:
    (cancelled,) = yield Statement(query("delayed_cancel"), {"delayed_id": delayed_id})
    return bool(cancelled)


def _message_of(
    topic: str,
    delay_s: float | None,
    at: datetime | None,
    key: str | None,
    body: Body,
    headers: Mapping[str, str] | None,
    tags: Sequence[str],
) -> OutboxMessage:
    if (delay_s is None) == (at is None):
        raise InvalidInput("a delayed message has either delay_s or at")
    if delay_s is not None and not 0 <= delay_s <= LONGEST_DELAY_S:
        raise InvalidInput(f"a delay is 0 to {LONGEST_DELAY_S} seconds, not {delay_s}")
    if at is not None and at.tzinfo is None:
        raise InvalidInput("at needs a time zone: datetime.now(UTC) + timedelta(hours=1)")
    return message_of(topic, key=key, body=body, headers=headers, tags=tags)


def _of_alias(connection: Any) -> Any:
    return django_connections.of_alias(connection) if isinstance(connection, str) else connection
