"""What the test's own transaction has published; nothing has to commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import psycopg

from mqlayer.arguments import explain
from mqlayer.errors import InvalidInput
from mqlayer.outbox import django_connections, sqlalchemy_connections, transaction_buffer
from mqlayer.outbox.outbox_message import OutboxMessage
from mqlayer.postgres.caller_connections import Statement, Statements, run, run_async
from mqlayer.postgres.queries import query
from mqlayer.testing.assertions import check_not_published, check_published
from mqlayer.testing.messages import PublishedMessage, TopicOrName, Wanted, published_of
from mqlayer.testing.sessions import TransactionState, messages_of


@explain
def published(topic: TopicOrName | None = None, *, on: Any) -> list[PublishedMessage]:
    """Return what the open transaction of a connection has published: psycopg, SQLAlchemy, Django or a Django alias.

    Written and collected messages, and delayed ones. Raises InvalidInput for an asynchronous one: see `apublished`.
    """
    connection = django_connections.of_alias(on) if isinstance(on, str) else on
    return _of_topic(_published(connection), topic)


@explain
async def apublished(topic: TopicOrName | None = None, *, on: Any) -> list[PublishedMessage]:
    """`published` of an async connection or session."""
    if isinstance(on, TransactionState):
        found = _published(on)
    elif sqlalchemy_connections.recognises(on):
        found = await on.run_sync(_published)
    else:
        found = await run_async(on, _reading(on))
    return _of_topic(found, topic)


@explain
def assert_published(
    topic: TopicOrName,
    *,
    on: Any,
    key: str | None = None,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    tags: Sequence[str] | None = None,
    count: int | None = None,
) -> PublishedMessage:
    """Assert that a message matches, or `count` do; return the first one.

    `on`: a connection, or messages of `published` or `apublished`. `body`: an equal value, a dict that is part of it,
    or a predicate. `headers` and `tags` may be a part. Raises AssertionError with the nearest misses.
    """
    return check_published(_messages(on), Wanted(topic, key, body, headers, tags), count)


@explain
def assert_not_published(
    topic: TopicOrName,
    *,
    on: Any,
    key: str | None = None,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    tags: Sequence[str] | None = None,
) -> None:
    """Assert that no message matches; arguments as of `assert_published`."""
    check_not_published(_messages(on), Wanted(topic, key, body, headers, tags))


def _messages(on: Any) -> Sequence[PublishedMessage]:
    if isinstance(on, list) and not all(isinstance(one, PublishedMessage) for one in on):
        raise InvalidInput("`on` is a connection, or a list of what `published` returned")
    return on if isinstance(on, list) else published(on=on)


def _of_topic(messages: list[PublishedMessage], topic: TopicOrName | None) -> list[PublishedMessage]:
    name = topic if topic is None or isinstance(topic, str) else topic.name
    return [message for message in messages if name in (None, message.topic)]


def _published(connection: Any) -> list[PublishedMessage]:
    if isinstance(connection, TransactionState):
        return [published_of(message) for message in messages_of(connection)]
    if hasattr(connection, "run_sync") or isinstance(connection, psycopg.AsyncConnection):
        kind = type(connection).__name__
        raise InvalidInput(f"a {kind} is asynchronous: await apublished(on=…), and assert on that")
    return run(connection, _reading(connection))


def _reading(connection: Any) -> Statements[list[PublishedMessage]]:
    collected: list[OutboxMessage] = []
    if isinstance(connection, psycopg.Connection | psycopg.AsyncConnection):
        collected = yield from transaction_buffer.collected(connection)
    elif sqlalchemy_connections.recognises(connection):
        collected = sqlalchemy_connections.collected(connection)
    elif django_connections.recognises(connection):
        collected = django_connections.collected(connection)
    here, readable = yield Statement(query("outbox_here"), {})
    rows: tuple[Any, ...] = (None,)
    if here and not readable:
        raise InvalidInput("the role of this connection can't read the outbox: test with the owner of the schema")
    if here:
        rows = yield Statement(query("outbox_uncommitted"), {})
    written = zip(*rows, strict=True) if rows[0] is not None else ()
    return [_written(*row) for row in written] + [published_of(message) for message in collected]


def _written(topic: str, key: str | None, body: bytes, headers: str | None, due_at: Any) -> PublishedMessage:
    message = OutboxMessage(topic, key, bytes(body), headers)
    return published_of(message, delayed=due_at is not None, due_at=due_at)
