"""Check and encode messages where they are published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from mqlayer.domain.codecs import AnyBody, encode_body
from mqlayer.domain.dedup import encode_dedup_id
from mqlayer.domain.large_bodies import BODY_HEADER, SMALLEST_THRESHOLD, BodyReference
from mqlayer.domain.names import BODY_LIMIT, check_body, check_headers, check_name, encode_key, with_headers
from mqlayer.domain.tags import TAGS_HEADER, tags_text
from mqlayer.errors import InvalidInput, ReservedHeader
from mqlayer.large_bodies import BodySource, process_options, source_of, stored_body, storing, storing_source
from mqlayer.large_bodies.options import limit_of
from mqlayer.postgres.caller_connections import Blocking, StandIn, Statements
from mqlayer.traces import TRACEPARENT, process_tracing

Body = AnyBody

_encode_json = msgspec.json.Encoder().encode


class OutboxMessage(NamedTuple):
    """The SQL functions' arguments; headers as JSON."""

    topic: str
    key: str | None
    body: bytes
    headers: str | None
    dedup_id: str | None = None


class UnreadMessage(OutboxMessage):
    """A message whose body is in an unread source."""

    source: BodySource

    @classmethod
    def of(cls, facts: tuple[Any, ...], source: BodySource) -> UnreadMessage:
        """Return a message with a source."""
        message = cls(*facts)
        message.source = source
        return message

    def with_body(self, body: bytes) -> OutboxMessage:
        """Return it with its body."""
        return OutboxMessage(self.topic, self.key, body, self.headers, self.dedup_id)


def message_of(
    topic: str,
    *,
    key: str | None,
    body: Body,
    headers: Mapping[str, str] | None,
    tags: Sequence[str] = (),
    dedup_id: str | None = None,
) -> OutboxMessage:
    """Return a checked message. Raises InvalidInput and its kinds.

    The database checks the topic and its body limit.
    """
    check_name("topic", topic)
    if key is not None:
        encode_key(key)
        if "\0" in key:
            raise InvalidInput("a message key with a NUL character: Postgres can't store it")
    if dedup_id is not None:
        encode_dedup_id(dedup_id)
    source = source_of(topic, body)
    data = encode_body(body) if source is None else b""
    check_body(topic, data, limit_of(len(data), BODY_LIMIT))
    tracing = process_tracing()
    if tracing is not None and TRACEPARENT not in (headers or {}):
        headers = with_headers(headers or {}, tracing.create(topic, key))
    facts = (topic, key, data, _headers_text(headers or {}, tags) if headers or tags else None, dedup_id)
    return OutboxMessage(*facts) if source is None else UnreadMessage.of(facts, source)


def placed(connection: Any, message: OutboxMessage) -> Statements[OutboxMessage]:
    """Store a large body in the transaction; return the message to write."""
    if isinstance(message, UnreadMessage):
        return (yield from _read(connection, message))
    if len(message.body) <= SMALLEST_THRESHOLD or isinstance(connection, StandIn):
        return message
    options = process_options()
    if not options.on or len(message.body) <= options.threshold:
        return message
    stored = stored_body(message.topic, message.body, options)
    yield from storing(stored)
    return _naming(message, stored.reference)


def whole(message: OutboxMessage) -> OutboxMessage:
    """Return a message with the body that its source has. Raises BodyTooLarge."""
    if not isinstance(message, UnreadMessage):
        return message
    options = process_options()
    most = options.limit if options.on else BODY_LIMIT
    body = message.source.read(most + 1)
    return message.with_body(check_body(message.topic, body, limit_of(len(body), BODY_LIMIT)))


def _read(connection: Any, message: UnreadMessage) -> Statements[OutboxMessage]:
    options = process_options()
    found: list[OutboxMessage] = []
    if isinstance(connection, StandIn) or not options.on:
        yield Blocking(lambda: found.append(whole(message)))
        return found[0]
    source = message.source

    def begin() -> None:
        found.append(message.with_body(source.read(options.threshold + 1)))

    yield Blocking(begin)
    if len(found[0].body) <= options.threshold:
        return found[0]
    source.put_back(found[0].body)
    found.clear()
    return _naming(message, (yield from storing_source(message.topic, source, options)))


def _naming(message: OutboxMessage, reference: BodyReference) -> OutboxMessage:
    pair = _encode_json({BODY_HEADER: str(reference)}).decode()
    headers = pair if message.headers is None else f"{pair[:-1]},{message.headers[1:]}"
    return OutboxMessage(message.topic, message.key, b"", headers, message.dedup_id)


def arguments_of(messages: Sequence[OutboxMessage]) -> dict[str, list[Any] | None]:
    """Return arguments of publish_many_v1 and publish_many_once_v1."""
    columns: dict[str, list[Any]] = {
        "topics": [message.topic for message in messages],
        "keys": [message.key for message in messages],
        "bodies": [message.body for message in messages],
        "headers": [message.headers for message in messages],
        "dedup_ids": [message.dedup_id for message in messages],
    }
    # psycopg sends an array of nulls as text, which needs array_nulls; NULL means the same.
    return {name: None if all(one is None for one in column) else column for name, column in columns.items()}


def _headers_text(headers: Mapping[str, str], tags: Sequence[str]) -> str:
    check_headers(headers)
    if any("\0" in part for item in headers.items() for part in item):
        raise ReservedHeader("a NUL character in them: Postgres can't store it")
    with_tags = {**headers, TAGS_HEADER: tags_text(tags)} if tags else dict(headers)
    return _encode_json(with_tags).decode()
