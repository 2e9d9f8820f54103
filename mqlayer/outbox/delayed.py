"""Delayed messages: stored with the caller's transaction, published when they are due.

They wait in the application's database. A relay, or the job `release_delayed`, moves what is due to the outbox, and
that is when a message takes its place in its key's order: behind all that were published before, in front of all later
ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from mqlayer.domain.names import check_name
from mqlayer.errors import InvalidInput
from mqlayer.outbox import django_connections
from mqlayer.outbox.outbox_message import Body, message_of
from mqlayer.postgres.caller_connections import caller_errors, run_one, run_one_async
from mqlayer.postgres.database import Database
from mqlayer.postgres.delayed_release import release_on
from mqlayer.postgres.queries import query

WAIT_MS: Final = 1_000
"""How long the job waits for a busy LP whose message is overdue."""
LONGEST_DELAY_S: Final = 10 * 366 * 86_400


@dataclass(frozen=True, slots=True)
class Delayed:
    """A message that waits for its time. `size` is that of its body, in bytes."""

    delayed_id: int
    topic: str | None
    key: str | None
    lp: int
    due_at: datetime
    created_at: datetime
    size: int


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
    """Publish a message after a delay, or at a time, if the caller's transaction commits; return its number.

    Either `delay_s`, in seconds, or `at`, with a time zone; by the clock of the application's database. The message is
    published when it is due, and has its place in its key's order from then on: messages of the key that are published
    meanwhile come first. Delayed messages of a key are published in the order of their times, then of their numbers.
    It is stored at once, whatever the connection, and no LP is locked. `cancel_delayed` takes the number.

    Raises what `publish` does, and InvalidInput for neither or both of `delay_s` and `at`.
    """
    facts = _facts(topic, delay_s, at, key, body, headers, tags)
    connection = _of_alias(connection)
    with caller_errors(connection):
        return int(run_one(connection, query("delayed_publish"), facts)[0])


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
    """Do what `publish_delayed` does, on an async connection."""
    facts = _facts(topic, delay_s, at, key, body, headers, tags)
    with caller_errors(connection):
        return int((await run_one_async(connection, query("delayed_publish"), facts))[0])


def cancel_delayed(connection: Any, delayed_id: int) -> bool:
    """Cancel a delayed message if the caller's transaction commits; False where it is not there any more."""
    connection = _of_alias(connection)
    with caller_errors(connection):
        return bool(run_one(connection, query("delayed_cancel"), {"delayed_id": delayed_id})[0])


async def acancel_delayed(connection: Any, delayed_id: int) -> bool:
    """Do what `cancel_delayed` does, on an async connection."""
    with caller_errors(connection):
        return bool((await run_one_async(connection, query("delayed_cancel"), {"delayed_id": delayed_id}))[0])


def list_delayed(application: Database, *, topic: str | None = None, limit: int = 100) -> list[Delayed]:
    """Return delayed messages, of a topic or all, the next ones first."""
    if topic is not None:
        check_name("topic", topic)
    with application.connection() as connection:
        rows = connection.execute(query("delayed_list"), {"topic": topic, "limit": limit}).fetchall()
    return [Delayed(*row) for row in rows]


def release_delayed(application: Database, *, at_most_s: float = 5.0) -> int:
    """Publish what is due; return how many messages. Safe to run twice at once, and beside relays."""
    until, count = time.monotonic() + at_most_s, 0
    with application.connection() as connection:
        while True:
            released = release_on(connection, wait_ms=WAIT_MS).moved
            count += released
            if not released or time.monotonic() >= until:
                return count


def _facts(
    topic: str,
    delay_s: float | None,
    at: datetime | None,
    key: str | None,
    body: Body,
    headers: Mapping[str, str] | None,
    tags: Sequence[str],
) -> dict[str, Any]:
    if (delay_s is None) == (at is None):
        raise InvalidInput("a delayed message has either delay_s or at")
    if delay_s is not None and not 0 <= delay_s <= LONGEST_DELAY_S:
        raise InvalidInput(f"a delay is 0 to {LONGEST_DELAY_S} seconds, not {delay_s}")
    if at is not None and at.tzinfo is None:
        raise InvalidInput("at needs a time zone: datetime.now(UTC) + timedelta(hours=1)")
    message = message_of(topic, key=key, body=body, headers=headers, tags=tags)
    return message._asdict() | {"delay_s": delay_s, "at": at}


def _of_alias(connection: Any) -> Any:
    return django_connections.of_alias(connection) if isinstance(connection, str) else connection
