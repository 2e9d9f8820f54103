"""Typed topics: the name, the body's type and the key of a topic, said once for publishers and handlers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any, Generic, Protocol, TypeAlias

from mqlayer import outbox
from mqlayer.arguments import explain_methods
from mqlayer.domain.body_schemas import normalized, schema_of
from mqlayer.domain.cloud_events import CloudEvents
from mqlayer.domain.codecs import Body, Codec, content_type_of, decoder_for, decoder_of, encode_body, type_name
from mqlayer.domain.names import check_name, encode_key
from mqlayer.errors import InvalidInput
from mqlayer.outbox import Published
from mqlayer.producing import AsyncProducer, Producer, Receipt


class SyncSession(Protocol):
    """A psycopg Connection, or SQLAlchemy's Session or Connection."""

    def commit(self) -> None:
        """Commit."""


class AsyncSession(Protocol):
    """A psycopg AsyncConnection, or SQLAlchemy's AsyncSession or AsyncConnection."""

    async def commit(self) -> None:
        """Commit."""


Session: TypeAlias = SyncSession | str
"""Or the alias of a Django connection."""


@explain_methods
class Topic(Generic[Body]):
    """A topic whose bodies have one type.

    ```python
    orders = mqlayer.Topic("orders", body=OrderPlaced, key=lambda order: order.customer)
    orders.publish(session, OrderPlaced("ann", 10))

    @app.consumer(orders, group="ledger")
    def book(order: OrderPlaced, ctx: mqlayer.Context) -> None: ...
    ```

    `body`: a msgspec Struct, pydantic model, dataclass, TypedDict, bytes, str, or any type that msgspec reads from
    JSON. `key`: a body's message key; without it, messages have the key that the call gives, or none. `codec`: another
    content type than JSON, which its attribute `content_type` names. `cloudevents`: headers of CloudEvents. Calls
    raise as those of `outbox` and `Producer`, and InvalidInput for another type of body.
    """

    def __init__(
        self,
        name: str,
        *,
        body: type[Body],
        key: Callable[[Body], str | None] | None = None,
        codec: Codec[Body] | None = None,
        cloudevents: CloudEvents | None = None,
    ) -> None:
        """Raises InvalidInput for a name or a type that can't be used."""
        check_name("topic", name)
        self._cloudevents = cloudevents
        self._name, self._body, self._key, self._codec = name, body, key, codec
        self._decode = decoder_for(body) if codec is None else decoder_of(codec, body)

    def __repr__(self) -> str:
        return f"Topic({self._name!r}, body={type_name(self._body)})"

    @property
    def name(self) -> str:
        """The topic's name."""
        return self._name

    @property
    def body(self) -> type[Body]:
        """The type of its bodies."""
        return self._body

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON Schema of its bodies; None for bytes, str, and a codec without `json_schema()`."""
        described = self.described_schema()
        return None if described is None else normalized(described)

    @property
    def codec(self) -> Codec[Body] | None:
        """Its codec; None: JSON."""
        return self._codec

    @property
    def content_type(self) -> str:
        """The media type of its bodies; a codec's attribute `content_type` says its own."""
        if self._codec is None:
            return content_type_of(self._body)
        return str(getattr(self._codec, "content_type", content_type_of(bytes)))

    @property
    def cloudevents(self) -> CloudEvents | None:
        """What its messages say of themselves as CloudEvents, if they do."""
        return self._cloudevents

    def described_schema(self) -> dict[str, Any] | None:
        """Return `schema` with titles and descriptions, as the body's library gives it."""
        if self._codec is None:
            return schema_of(self._body)
        found = getattr(self._codec, "json_schema", None)
        return None if found is None else dict(found())

    def encode(self, body: Body) -> bytes:
        """Return a body's bytes. Raises InvalidInput."""
        _check_type(self._name, self._body, body)
        if self._codec is None:
            return encode_body(body)
        try:
            data = self._codec.encode(body)
        except Exception as error:
            raise InvalidInput(f"{type(self._codec).__name__} can't encode a body of topic {self._name!r}") from error
        if not isinstance(data, bytes):
            raise InvalidInput(f"{type(self._codec).__name__} encodes to {type(data).__name__}: let it return bytes")
        return data

    def decode(self, data: bytes) -> Body:
        """Return a body. Raises BodyMismatch."""
        return self._decode(data)

    def key_of(self, body: Body) -> str | None:
        """Return a body's message key."""
        return None if self._key is None else self._key(body)

    def publish(
        self,
        session: Session,
        body: Body,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        tags: Sequence[str] = (),
        dedup_id: str | None = None,
    ) -> None:
        """Publish if and only if the session's transaction commits; see `outbox.publish`."""
        outbox.publish(session, self._name, dedup_id=dedup_id, **self._facts(body, key, headers, tags))

    async def apublish(
        self,
        session: AsyncSession,
        body: Body,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        tags: Sequence[str] = (),
        dedup_id: str | None = None,
    ) -> None:
        """As `publish`, on an async session."""
        await outbox.apublish(session, self._name, dedup_id=dedup_id, **self._facts(body, key, headers, tags))

    def publish_once(
        self,
        session: Session,
        body: Body,
        *,
        dedup_id: str,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        tags: Sequence[str] = (),
    ) -> Published:
        """Publish with a dedup id now, and report a duplicate; see `outbox.publish_once`."""
        return outbox.publish_once(session, self._name, dedup_id=dedup_id, **self._facts(body, key, headers, tags))

    def publish_delayed(
        self,
        session: Session,
        body: Body,
        *,
        delay_s: float | None = None,
        at: datetime | None = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        tags: Sequence[str] = (),
    ) -> int:
        """Publish after `delay_s` seconds or `at` a time; return its number. See `outbox.publish_delayed`."""
        facts = self._facts(body, key, headers, tags)
        return outbox.publish_delayed(session, self._name, delay_s=delay_s, at=at, **facts)

    def send(
        self,
        producer: Producer,
        body: Body,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        tags: Sequence[str] = (),
        dedup_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Receipt:
        """Publish directly and return the message's place; see `Producer.send`."""
        facts = self._facts(body, key, headers, tags)
        return producer.send(self._name, dedup_id=dedup_id, timeout_s=timeout_s, **facts)

    def send_async(
        self,
        producer: Producer,
        body: Body,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        tags: Sequence[str] = (),
        dedup_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Future[Receipt]:
        """Queue for direct publishing and return a future; see `Producer.send_async`."""
        facts = self._facts(body, key, headers, tags)
        return producer.send_async(self._name, dedup_id=dedup_id, timeout_s=timeout_s, **facts)

    async def asend(
        self,
        producer: AsyncProducer,
        body: Body,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        tags: Sequence[str] = (),
        dedup_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Receipt:
        """Publish directly with asyncio; see `AsyncProducer.send`."""
        facts = self._facts(body, key, headers, tags)
        return await producer.send(self._name, dedup_id=dedup_id, timeout_s=timeout_s, **facts)

    def _facts(
        self, body: Body, key: str | None, headers: Mapping[str, str] | None, tags: Sequence[str]
    ) -> dict[str, Any]:
        data = self.encode(body)
        key = self.key_of(body) if key is None else key
        if key is not None:
            encode_key(key)
        if self._cloudevents is not None:
            headers = {**self._event_headers(self._cloudevents, body, key), **(headers or {})}
        return {"body": data, "key": key, "headers": headers, "tags": tags}

    def _event_headers(self, said: CloudEvents, body: Body, key: str | None) -> dict[str, str]:
        event_id, now = str(uuid.uuid4()), datetime.now(UTC)
        return said.headers(body, event_id=event_id, time=now, subject=key, content=self.content_type)


def _check_type(topic: str, wanted: Any, body: object) -> None:
    # A TypedDict is a dict, and some types, such as list[Order], are no classes.
    kind = dict if isinstance(wanted, type) and issubclass(wanted, dict) else wanted
    if isinstance(kind, type) and not isinstance(body, kind):
        raise InvalidInput(f"topic {topic!r} has bodies of type {type_name(wanted)}, not {type(body).__name__}")
