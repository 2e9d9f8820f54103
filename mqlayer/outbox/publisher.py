"""Publish in the caller's own transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mqlayer.arguments import explain
from mqlayer.outbox import django_connections, sqlalchemy_connections
from mqlayer.outbox.outbox_message import Body, OutboxMessage, message_of, placed
from mqlayer.outbox.transaction_buffer import publishing
from mqlayer.postgres.caller_connections import Statement, Statements, run, run_async
from mqlayer.postgres.queries import query


@explain
def publish(
    connection: Any,
    topic: str,
    *,
    key: str | None = None,
    body: Body = b"",
    headers: Mapping[str, str] | None = None,
    tags: Sequence[str] = (),
    dedup_id: str | None = None,
) -> None:
    """Publish a message if and only if the caller's transaction commits.

    A key's messages arrive in commit order, within a transaction in call order; keyless ones have no order. `tags`: up
    to 8 names for filters. `dedup_id`: a name within the key; repetitions are dropped while it is remembered.

    - SQLAlchemy Session or Connection: collected, written right before COMMIT, sorted by LP. Rolling back a savepoint
      discards its messages.
    - Django connection or alias: the same inside `transaction.atomic()`; outside, each call is a transaction.
    - psycopg 3 connection: the same inside `outbox.transaction(connection)`; otherwise written at once, with
      `autocommit` as a transaction.

    Writing locks each LP until COMMIT. Without collecting, publish keys in one order everywhere, or transactions may
    deadlock.

    Raises, now or at COMMIT: InvalidInput and its kinds, NotFound for an unknown topic, TransactionConflict if the
    whole transaction must run again (the page 'Publish with a transaction'), StoreUnavailable, SchemaMismatch.
    """
    message = message_of(topic, key=key, body=body, headers=headers, tags=tags, dedup_id=dedup_id)
    if isinstance(connection, str):
        connection = django_connections.of_alias(connection)
    if sqlalchemy_connections.recognises(connection):
        sqlalchemy_connections.publish(connection, run(connection, placed(connection, message)))
    elif django_connections.recognises(connection):
        django_connections.publish(connection, run(connection, placed(connection, message)))
    else:
        run(connection, publishing(connection, message))


@explain
async def apublish(
    connection: Any,
    topic: str,
    *,
    key: str | None = None,
    body: Body = b"",
    headers: Mapping[str, str] | None = None,
    tags: Sequence[str] = (),
    dedup_id: str | None = None,
) -> None:
    """As `publish`, on an AsyncConnection (psycopg, SQLAlchemy) or AsyncSession."""
    message = message_of(topic, key=key, body=body, headers=headers, tags=tags, dedup_id=dedup_id)
    if sqlalchemy_connections.recognises(connection):
        message = await run_async(connection, placed(connection, message))
        await connection.run_sync(sqlalchemy_connections.publish, message)
    else:
        await run_async(connection, publishing(connection, message))


class Published(NamedTuple):
    """A message's seq in its LP; a `duplicate`'s first seq."""

    seq: int
    duplicate: bool


@explain
def publish_once(
    connection: Any,
    topic: str,
    *,
    dedup_id: str,
    key: str | None = None,
    body: Body = b"",
    headers: Mapping[str, str] | None = None,
    tags: Sequence[str] = (),
) -> Published:
    """Publish a message with a dedup id now; report a duplicate.

    Never collected: it locks the LP until COMMIT, and precedes collected messages. Raises as `publish`.
    """
    message = message_of(topic, key=key, body=body, headers=headers, tags=tags, dedup_id=_given(dedup_id))
    if isinstance(connection, str):
        connection = django_connections.of_alias(connection)
    return run(connection, _publishing_once(connection, message))


@explain
async def apublish_once(
    connection: Any,
    topic: str,
    *,
    dedup_id: str,
    key: str | None = None,
    body: Body = b"",
    headers: Mapping[str, str] | None = None,
    tags: Sequence[str] = (),
) -> Published:
    """As `publish_once`, on an async connection."""
    message = message_of(topic, key=key, body=body, headers=headers, tags=tags, dedup_id=_given(dedup_id))
    return await run_async(connection, _publishing_once(connection, message))


def _publishing_once(connection: Any, message: OutboxMessage) -> Statements[Published]:
    message = yield from placed(connection, message)
    row = yield Statement(query("outbox_publish_once"), message._asdict())
    return Published(*row)


def _given(dedup_id: str | None) -> str:
    return "" if dedup_id is None else dedup_id
