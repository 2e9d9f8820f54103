"""Appends as bytes ready for the wire: the form for senders of many small messages.

`append_command` hands five objects per message to the driver, which looks at each before it encodes it; that costs
more than everything else on the way of a message. Here a message becomes bytes once, when it is published, however
often it is sent, and a batch is one `join`. The protocol is that of the server (RESP2 requests): an array of bulk
strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from mqlayer.domain.dedup import IDS_PER_PARTITION
from mqlayer.redis.keys import ended_sources_key, partition_keys, terms_key
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import marks_command

LINE_END: Final = b"\r\n"


def bulk(data: bytes) -> bytes:
    """Return a bulk string."""
    return b"$%d\r\n%b\r\n" % (len(data), data)


@lru_cache(maxsize=16_384)
def bulk_head(size: int) -> bytes:
    """Return what stands before a bulk string's bytes; LINE_END follows them."""
    return b"$%d\r\n" % size


@lru_cache(maxsize=65_536)
def bulk_number(number: int) -> bytes:
    """Return a number as a bulk string."""
    return bulk(b"%d" % number)


@lru_cache(maxsize=1_024)
def _append_start(digest: bytes, prefix: str, partition: int, source: int, backlog: int, term: str) -> bytes:
    keys = partition_keys(prefix, partition)
    names = (keys.log, keys.meta, keys.marks, ended_sources_key(prefix), terms_key(prefix))
    values = (b"%d" % source, b"%d" % backlog, term.encode())
    return b"".join(map(bulk, (b"EVALSHA", digest, b"5", *names, *values)))


def append_packet(
    connection: NodeConnection,
    prefix: str,
    partition: int,
    source: int,
    heads: Sequence[bytes],
    messages: Sequence[bytes],
    *,
    count: int,
    backlog: int = 0,
    term: str = "",
) -> bytes:
    """Return the request that appends runs to a partition, to be sent with `send_packet`; it has one reply.

    `heads`: for each run three bulk numbers: LP, first seq, count. `messages`: the pieces of the runs' messages in
    order, `count` messages in all; the pieces of a message, joined, are three bulk strings: facts, key, body. `term`:
    see `set_term`.
    """
    start = _append_start(connection.digest("log_append"), prefix, partition, source, backlog, term)
    length = 12 + len(heads) + 3 * count
    return b"".join((b"*%d\r\n" % length, start, bulk_number(len(heads) // 3), *heads, *messages))


@lru_cache(maxsize=1_024)
def _append_once_start(digest: bytes, prefix: str, partition: int, source: int, backlog: int, window_ms: int) -> bytes:
    numbers = (source, backlog, window_ms, IDS_PER_PARTITION)
    start = (b"EVALSHA", digest, b"5", *partition_keys(prefix, partition), *(b"%d" % number for number in numbers))
    return b"".join(map(bulk, start))


def append_once_packet(
    connection: NodeConnection,
    prefix: str,
    partition: int,
    source: int,
    chunks: Sequence[bytes],
    *,
    count: int,
    backlog: int,
    window_ms: int,
) -> bytes:
    """Return the request that appends messages with dedup ids to a partition; it has one reply.

    `chunks`, joined, are for each of `count` messages six bulk strings: LP, seq, token, facts, key, body.
    """
    start = _append_once_start(connection.digest("log_append_once"), prefix, partition, source, backlog, window_ms)
    return b"".join((b"*%d\r\n" % (13 + 6 * count), start, bulk_number(count), *chunks))


def message_packet(facts: bytes, key: bytes, body: bytes) -> bytes:
    """Return a message of an append packet as one piece."""
    return b"$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(facts), facts, len(key), key, len(body), body)


def marks_packet(connection: NodeConnection, prefix: str, partition: int, source: int, lps: Sequence[int]) -> bytes:
    """Return the request for a partition's state and a source's marks of some LPs; see marks_read."""
    words = marks_command(connection, prefix, partition, [b"%d:%d" % (source, lp) for lp in lps])
    return b"*%d\r\n" % len(words) + b"".join(map(bulk, words))


def wait_packet(replicas: int, timeout_ms: int) -> bytes:
    """Return the request that waits until replicas received all that this connection wrote; its reply is how many."""
    return b"*3\r\n" + bulk(b"WAIT") + bulk_number(replicas) + bulk_number(timeout_ms)
