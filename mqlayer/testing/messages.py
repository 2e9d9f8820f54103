"""Messages as tests see them, and how they are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from mqlayer.arguments import explain
from mqlayer.domain.codecs import encode_body
from mqlayer.domain.message import NO_KEY, Identity, Record
from mqlayer.errors import BodyMismatch
from mqlayer.outbox.outbox_message import OutboxMessage

_NOT_JSON: Final = object()
_SHOWN: Final = 200


class NamedTopic(Protocol):
    """A `mqlayer.Topic`, of any body."""

    @property
    def name(self) -> str:
        """The topic's name."""

    def encode(self, body: Any) -> bytes:
        """Return a body's bytes."""

    def decode(self, data: bytes) -> Any:
        """Return a body."""

    def key_of(self, body: Any) -> str | None:
        """Return a body's message key."""


TopicOrName: TypeAlias = NamedTopic | str


@dataclass(frozen=True, slots=True)
class PublishedMessage:
    """A message that was published. `due_at`: when a delayed one is due, if known."""

    topic: str
    key: str | None
    body: bytes
    headers: Mapping[str, str]
    tags: tuple[str, ...] = ()
    delayed: bool = False
    due_at: datetime | None = None

    def __str__(self) -> str:
        parts = [f"key {self.key!r}", _shown(self.body)]
        parts += [f"tags {', '.join(self.tags)}"] if self.tags else []
        parts += [f"headers {dict(self.headers)}"] if self.headers else []
        parts += ["delayed"] if self.delayed else []
        return f"{self.topic}: {', '.join(parts)}"

    @explain
    def value(self, topic: TopicOrName) -> Any:
        """Return its body as a typed topic reads it; else the bytes."""
        return self.body if isinstance(topic, str) else topic.decode(self.body)


def topic_name(topic: TopicOrName) -> str:
    """Return a topic's name."""
    return topic if isinstance(topic, str) else topic.name


def new_message(topic: TopicOrName, body: Any, key: str | None) -> dict[str, Any]:
    """Return topic, body and key as `outbox.publish` takes them; a typed topic encodes the body and knows the key."""
    if isinstance(topic, str):
        return {"topic": topic, "body": body, "key": key}
    return {"topic": topic.name, "body": topic.encode(body), "key": topic.key_of(body) if key is None else key}


def published_of(message: OutboxMessage, *, delayed: bool = False, due_at: datetime | None = None) -> PublishedMessage:
    """Return an outbox's message as a test sees it."""
    record = record_of(message, 0, Identity(0, 0, 0), 0)
    return PublishedMessage(
        message.topic, message.key, message.body, record.headers, record.tags, delayed=delayed, due_at=due_at
    )


def message_in(topic: str, record: Record) -> PublishedMessage:
    """Return a record as a test sees it."""
    key = None if record.key == NO_KEY else record.key.decode()
    return PublishedMessage(topic, key, record.body, record.headers, record.tags)


def record_of(message: OutboxMessage, offset: int, identity: Identity, at_ms: int) -> Record:
    """Return a message as a partition holds it."""
    facts = b"%d:%d:%d:%d" % (*identity, at_ms)
    if message.headers is not None:
        facts += b":" + message.headers.encode()
    return Record(offset, facts, NO_KEY if message.key is None else message.key.encode(), message.body)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a test looks for; None: anything. `body`: a value, a dict that is part of it, or a predicate."""

    topic: TopicOrName
    key: str | None = None
    body: Any = None
    headers: Mapping[str, str] | None = None
    tags: Sequence[str] | None = None

    @property
    def name(self) -> str:
        """The topic's name."""
        return self.topic if isinstance(self.topic, str) else self.topic.name

    def __str__(self) -> str:
        said = {"key": self.key, "headers": self.headers, "tags": self.tags}
        parts = [f"{name} {value!r}" for name, value in said.items() if value is not None]
        if self.body is not None:
            parts.append(f"body {getattr(self.body, '__name__', None) or repr(self.body)}")
        return f"{self.name}: {', '.join(parts) or 'any message'}"

    def misses(self, message: PublishedMessage) -> list[str]:
        """Return a message's differences; empty: it matches."""
        found = [] if self.key is None or self.key == message.key else [f"key is {message.key!r}"]
        found += [
            f"header {name!r} is {message.headers.get(name)!r}"
            for name, value in (self.headers or {}).items()
            if message.headers.get(name) != value
        ]
        missing = [] if self.tags is None else sorted(set(self.tags) - set(message.tags))
        found += [f"tags lack {', '.join(missing)}"] if missing else []
        return found + ([] if self.body is None else _body_misses(self.topic, self.body, message))


def matching(messages: Sequence[PublishedMessage], wanted: Wanted) -> list[PublishedMessage]:
    """Return a topic's messages that match."""
    return [message for message in messages if message.topic == wanted.name and not wanted.misses(message)]


def near_misses(messages: Sequence[PublishedMessage], wanted: Wanted, *, limit: int = 5) -> str:
    """Return lines on the messages published instead, the nearest first."""
    of_topic = [message for message in messages if message.topic == wanted.name]
    if not of_topic:
        others = sorted({message.topic for message in messages})
        return f"nothing was published to {wanted.name}; to others: {', '.join(others) or 'nothing'}"
    nearest = sorted(((wanted.misses(message), message) for message in of_topic), key=lambda pair: len(pair[0]))
    lines = [f"  {message}\n    {'; '.join(misses) or 'matches'}" for misses, message in nearest[:limit]]
    more = len(of_topic) - limit
    return "\n".join([f"published to {wanted.name}, the nearest first:", *lines, *([f"  … {more} more"] * (more > 0))])


def _body_misses(topic: TopicOrName, wanted: Any, message: PublishedMessage) -> list[str]:
    try:
        value = message.value(topic)
    except BodyMismatch as error:
        return [str(error)]
    if callable(wanted) and not isinstance(wanted, type):
        return _predicate_misses(wanted, value)
    if isinstance(wanted, Mapping):
        plain = _plain(value)
        if isinstance(plain, Mapping):
            return _part_misses(wanted, plain, "")
        return [f"the body is no object: {_shown(message.body)}"]
    same = value == wanted or (isinstance(topic, str) and message.body == encode_body(wanted))
    return [] if same else [f"body is {value!r}"]


def _predicate_misses(wanted: Callable[[Any], object], value: Any) -> list[str]:
    return [] if wanted(value) else [f"{getattr(wanted, '__name__', 'the predicate')} is false of {value!r}"]


def _part_misses(wanted: Mapping[str, Any], value: Mapping[str, Any], place: str) -> list[str]:
    found: list[str] = []
    for name, part in wanted.items():
        at, there = f"{place}{name}", value.get(name, _NOT_JSON)
        if there is _NOT_JSON:
            found.append(f"body.{at} is missing")
        elif isinstance(part, Mapping) and isinstance(there, Mapping):
            found += _part_misses(part, there, f"{at}.")
        elif there != part and there != _plain(part):
            found.append(f"body.{at} is {there!r}")
    return found


def _plain(value: Any) -> Any:
    """Return a body's JSON: objects as dicts."""
    try:
        return msgspec.json.decode(value if isinstance(value, bytes) else encode_body(value))
    except msgspec.DecodeError:
        return _NOT_JSON


def _shown(body: bytes) -> str:
    text = body.decode(errors="replace")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(body)} bytes)"
