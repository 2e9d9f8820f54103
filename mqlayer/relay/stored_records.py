"""Records of an outbox's source, compared with its rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

from mqlayer.domain.message import NO_KEY, VOID_HEADER
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection, raise_for_reply

FIRST_PAGE: Final = 20
PAGE: Final = 500
PAGE_BYTES: Final = 4_000_000
EMPTY: Final = hashlib.sha256(b"").digest()
_VOID: Final = f'"{VOID_HEADER}":'.encode()

Content = tuple[bytes, bytes, bytes]
"""Facts, key and the body's SHA-256."""
StoredRecord = tuple[int, int, Content]
"""LP, seq and content."""


def newest_records(
    connection: NodeConnection, prefix: str, partition: int, source: int, *, limit: int
) -> Iterator[list[StoredRecord]]:
    """Yield pages of a source's records, newest first, among a partition's `limit` newest."""
    key, before, count, left = partition_keys(prefix, partition).log, b"+", FIRST_PAGE, limit
    while left > 0:
        (reply,) = connection.call([(b"XREVRANGE", key, before, b"-", b"COUNT", count)])
        entries = raise_for_reply(reply, connection.node.address)
        yield [one for _, fields in entries if (one := _of_source(fields, source)) is not None]
        if len(entries) < count:
            return
        size = sum(len(part) for _, fields in entries for part in fields) // count
        before, left = b"(" + entries[-1][0], left - count
        count = max(1, min(PAGE, PAGE_BYTES // max(1, size)))


def marks_of(connection: NodeConnection, prefix: str, partitions: list[int], source: int) -> list[dict[int, int]]:
    """Return a source's marks by LP, per partition."""
    replies = connection.call([(b"HGETALL", partition_keys(prefix, partition).marks) for partition in partitions])
    return [_marks(raise_for_reply(reply, connection.node.address), source) for reply in replies]


def content_of_row(facts: str, key: str | None, body: bytes | None) -> Content:
    """Return the content of a row of the query `outbox_digests`."""
    return facts.encode(), NO_KEY if key is None else key.encode(), bytes(body or b"")


def is_of_row(record: Content, row: Content) -> bool:
    """Whether a record is a row's message, or its void record."""
    if record == row:
        return True
    at, _, headers = record[0].partition(b":")
    is_void = _VOID in headers and record[1:] == (NO_KEY, EMPTY)
    return is_void and at == row[0].partition(b":")[0]


def _of_source(fields: list[bytes], source: int) -> StoredRecord | None:
    of, _, rest = fields[1].partition(b":")
    if of != b"%d" % source:
        return None
    lp, seq, facts = rest.split(b":", 2)
    return int(lp), int(seq), (facts, fields[3], hashlib.sha256(fields[5]).digest())


def _marks(flat: list[bytes], source: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for name, seq in zip(flat[::2], flat[1::2], strict=True):
        of, lp = map(int, name.split(b":"))
        if of == source:
            found[lp] = int(seq)
    return found
