"""`publish`: put a message into the outbox in the caller's own transaction, on the caller's own connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import psycopg

from mqlayer.outbox import django_connections, sqlalchemy_connections, transaction_buffer
from mqlayer.outbox.batch_insert import asend, send
from mqlayer.outbox.outbox_message import Body, message_of
from mqlayer.postgres.caller_connections import caller_errors, run_one, run_one_async
from mqlayer.postgres.queries import query


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
    """Publish a message with the caller's transaction: it is sent if the transaction commits, else it never was.

    Messages of one key arrive in the order in which their transactions commit, and within a transaction in the order
    of the calls. A message without a key goes anywhere and has no order. `tags`: what groups may filter by, up to 8
    names. `dedup_id`: a name of the message within its key; a second one with it is not published while the first is
    remembered, which `publish_once` tells.

    - SQLAlchemy Session or Connection: collected, and written right before COMMIT, sorted by LP. What was published
      within a savepoint that is rolled back is forgotten.
    - Django database connection or its alias, inside `transaction.atomic()`: the same. Outside, each call is its own
      transaction.
    - psycopg 3 connection: inside `with outbox.transaction(connection)`: the same. Otherwise written at once, in the
      transaction that is open; with `autocommit`, each call is its own transaction.

    Writing takes a row lock per LP until COMMIT: two transactions that publish to one LP wait for each other, which
    is why what can be collected is. Published at once, several keys of one transaction should be in the same order
    everywhere, or two transactions may deadlock (TransactionConflict).

    Raises InvalidInput and its kinds at the call. Raises, at the call or where the transaction commits: NotFound for an
    unknown topic, InvalidInput for a body over the topic's limit, TransactionConflict where the whole transaction must
    be run again (a busy LP under REPEATABLE READ or SERIALIZABLE, a deadlock), StoreUnavailable, SchemaMismatch.
    """
    message = message_of(topic, key=key, body=body, headers=headers, tags=tags, dedup_id=dedup_id)
    if isinstance(connection, str):
        connection = django_connections.of_alias(connection)
    if sqlalchemy_connections.recognises(connection):
        sqlalchemy_connections.publish(connection, message)
    elif django_connections.recognises(connection):
        django_connections.publish(connection, message)
    elif not transaction_buffer.collect(connection, message):
        send(connection, [message])


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
    """Do what `publish` does, on a psycopg AsyncConnection or a SQLAlchemy AsyncSession or AsyncConnection."""
    message = message_of(topic, key=key, body=body, headers=headers, tags=tags, dedup_id=dedup_id)
    if sqlalchemy_connections.recognises(connection):
        await connection.run_sync(sqlalchemy_connections.publish, message)
    elif not isinstance(connection, psycopg.AsyncConnection) or not await transaction_buffer.acollect(
        connection, message
    ):
        await asend(connection, [message])


class Published(NamedTuple):
    """The seq of a message in its LP; of a `duplicate`, which was not published, that of the first one with its id."""

    seq: int
    duplicate: bool


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
    """Publish a message with a dedup id in the caller's transaction, now, and say whether it is a duplicate.

    It is not collected, whatever the connection: the LP is locked until COMMIT, and what the transaction collected
    before comes behind it. Errors: see `publish`.
    """
    message = message_of(topic, key=key, body=body, headers=headers, tags=tags, dedup_id=_given(dedup_id))
    if isinstance(connection, str):
        connection = django_connections.of_alias(connection)
    with caller_errors(connection):
        return Published(*run_one(connection, query("outbox_publish_once"), message._asdict()))


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
    """Do what `publish_once` does, on an async connection."""
    message = message_of(topic, key=key, body=body, headers=headers, tags=tags, dedup_id=_given(dedup_id))
    with caller_errors(connection):
        return Published(*await run_one_async(connection, query("outbox_publish_once"), message._asdict()))


def _given(dedup_id: str | None) -> str:
    return "" if dedup_id is None else dedup_id
