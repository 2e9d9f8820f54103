"""`publish`: put a message into the outbox in the caller's own transaction, on the caller's own connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import psycopg

from mqlayer.outbox import collecting, django_connections, sqlalchemy_connections
from mqlayer.outbox.messages import Body, message_of
from mqlayer.outbox.sending import asend, send


def publish(
    connection: Any,
    topic: str,
    *,
    key: str | None = None,
    body: Body = b"",
    headers: Mapping[str, str] | None = None,
    tags: Sequence[str] = (),
) -> None:
    """Publish a message with the caller's transaction: it is sent if the transaction commits, else it never was.

    Messages of one key arrive in the order in which their transactions commit, and within a transaction in the order
    of the calls. A message without a key goes anywhere and has no order. `tags`: what groups may filter by, up to 8
    names.

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
    message = message_of(topic, key=key, body=body, headers=headers, tags=tags)
    if isinstance(connection, str):
        connection = django_connections.of_alias(connection)
    if sqlalchemy_connections.recognises(connection):
        sqlalchemy_connections.publish(connection, message)
    elif django_connections.recognises(connection):
        django_connections.publish(connection, message)
    elif not collecting.collect(connection, message):
        send(connection, [message])


async def apublish(
    connection: Any,
    topic: str,
    *,
    key: str | None = None,
    body: Body = b"",
    headers: Mapping[str, str] | None = None,
    tags: Sequence[str] = (),
) -> None:
    """Do what `publish` does, on a psycopg AsyncConnection or a SQLAlchemy AsyncSession or AsyncConnection."""
    message = message_of(topic, key=key, body=body, headers=headers, tags=tags)
    if sqlalchemy_connections.recognises(connection):
        await connection.run_sync(sqlalchemy_connections.publish, message)
    elif not isinstance(connection, psycopg.AsyncConnection) or not await collecting.acollect(connection, message):
        await asend(connection, [message])
