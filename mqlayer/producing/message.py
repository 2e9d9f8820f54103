"""Messages, their checks and encoding."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec

from mqlayer.domain.codecs import AnyBody, encode_body
from mqlayer.domain.dedup import encode_dedup_id, lp_of_unkeyed, token_of
from mqlayer.domain.message import encode_facts
from mqlayer.domain.names import check_body, check_headers, encode_key
from mqlayer.domain.routing import Lp, lp_of, random_lp
from mqlayer.domain.tags import tags_text
from mqlayer.producing.send_queues import NO_KEY_BULK, PendingSend, TopicQueues
from mqlayer.redis.wire import LINE_END, bulk, bulk_head

Body = AnyBody


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message of a batch. No key: no order. `dedup_id`: its name within the key.

    The garbage collector skips it: large lists are cheap.
    """

    key: str | None
    body: Body
    headers: Mapping[str, str] | None = None
    tags: Sequence[str] = ()
    dedup_id: str | None = None


class ReferenceMessage(Message, frozen=True, gc=False):
    """A message whose body is elsewhere, by `reference`."""

    reference: str = ""


def pending_send_of(
    message: Message, topic: TopicQueues, deadline: float, rng: random.Random, *, eager: bool
) -> tuple[Lp, PendingSend]:
    """Return a message's LP and pending send. Raises for invalid input."""
    key, dedup_id = message.key, message.dedup_id
    lp, key_bulk = (random_lp(rng), NO_KEY_BULK) if key is None else lp_and_key(key)
    body, limit = message.body, topic.body_limit
    if type(body) is not bytes or len(body) > limit:
        body = whole_body(topic.name, body, limit)
    at_ms = time.time_ns() // 1_000_000
    if message.headers or message.tags or type(message) is not Message:
        facts = facts_bulk(at_ms, message.headers, message.tags, reference_of(message))
    else:
        facts = _plain_facts(at_ms)
    length = len(body)
    size = len(facts) + len(key_bulk) + length
    pending = PendingSend((facts, key_bulk, bulk_head(length), body, LINE_END), 1, size, deadline, None, eager=eager)
    if dedup_id is not None:
        lp, pending.token = lp_and_token(key, dedup_id, lp)
    return lp, pending


@lru_cache(maxsize=65_536)
def lp_and_key(key: str) -> tuple[Lp, bytes]:
    """Return a key's LP and encoding. Raises KeyTooLarge or InvalidInput."""
    data = encode_key(key)
    return lp_of(data), bulk(data)


def lp_and_token(key: str | None, dedup_id: str | None, lp: Lp) -> tuple[Lp, bytes]:
    """Return LP and dedup token; without an id, the given LP and b"". Raises InvalidInput."""
    if dedup_id is None:
        return lp, b""
    data = encode_dedup_id(dedup_id)
    return (lp_of_unkeyed(data) if key is None else lp), token_of(None if key is None else encode_key(key), data)


def whole_body(topic: str, body: Body, limit: int) -> bytes:
    """Return checked bytes. Raises BodyTooLarge or InvalidInput."""
    return check_body(topic, body if type(body) is bytes else encode_body(body), limit)


def reference_of(message: Message) -> str:
    """Return a stored body's reference, or ""."""
    return message.reference if isinstance(message, ReferenceMessage) else ""


def facts_bulk(at_ms: int, headers: Mapping[str, str] | None, tags: Sequence[str] = (), reference: str = "") -> bytes:
    """Return encoded facts. Raises ReservedHeader, or InvalidInput for bad tags."""
    checked = check_headers(headers) if headers else None
    return bulk(encode_facts(at_ms, checked, tags_text(tags) if tags else "", reference))


@lru_cache(maxsize=16)
def _plain_facts(at_ms: int) -> bytes:
    # Many messages are of the same millisecond.
    return facts_bulk(at_ms, None)


def chunks_of(facts: bytes, key: bytes, body: bytes) -> tuple[bytes, ...]:
    """Return a message's chunks, from encoded facts and key."""
    return (facts, key, bulk_head(len(body)), body, LINE_END)
