"""A key's messages: the archived ones, then those that are still only in Redis."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from mqlayer.domain.message import Record, encode_facts
from mqlayer.domain.names import check_name, encode_key
from mqlayer.domain.routing import lp_of
from mqlayer.domain.tags import tags_text
from mqlayer.inspect.topic_reader import StoredMessage, TopicReader
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime


def key_history(runtime: Runtime, topic: str, key: str, *, limit: int) -> list[StoredMessage]:
    """Return a key's last messages in order. Raises NotFound, KeyTooLarge, StoreUnavailable."""
    check_name("topic", topic)
    found = _archived(runtime.control, topic, key, limit)
    known = {message.identity for message in found}
    with TopicReader(runtime, topic, key=key) as reader:
        while not reader.at_end:
            found += [message for message in reader.read() if message.identity not in known]
    return found[-limit:]


def record_of(message: StoredMessage) -> Record:
    """Return a message as a handler's context takes it."""
    facts = encode_facts(_ms(message.published_at), message.headers, tags_text(message.tags) if message.tags else "")
    m = b"%d:%d:%d:%b" % (*message.identity, facts)
    return Record(message.offset, m, encode_key(message.key or ""), message.body)


def _archived(database: Database, topic: str, key: str, limit: int) -> list[StoredMessage]:
    name = encode_key(key)
    facts = {"topic": topic, "lp": lp_of(name), "key": name, "limit": limit}
    with database.connection() as connection:
        rows = connection.execute(query("archive_of_key"), facts).fetchall()
    return [StoredMessage.of(row[0], _record(name, row[1:])) for row in reversed(rows)]


def _record(key: bytes, row: Sequence[Any]) -> Record:
    offset, source, lp, seq, at, tags, headers, body = row
    said = msgspec.json.decode(headers, type=dict[str, str]) if headers else None
    facts = encode_facts(_ms(at), said, tags_text(tags) if tags else "")
    return Record(offset, b"%d:%d:%d:%b" % (source, lp, seq, facts), key, body)


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)
