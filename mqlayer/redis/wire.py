"""Appends as RESP2 bytes, encoded once: the driver's encoding costs most of a send."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

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
    """Return the head; bytes and LINE_END follow."""
    return b"$%d\r\n" % size


@lru_cache(maxsize=65_536)
def bulk_number(number: int) -> bytes:
    """Return a number as a bulk string."""
    return bulk(b"%d" % number)


@lru_cache(maxsize=1_024)
def append_start(
    digest: bytes,
    prefix: str,
    partition: int,
    source: int,
    backlog: int = 0,
    term: str = "",
    *,
    cluster: bool = False,
) -> bytes:
    """Return what a partition's appends have in common. `term`: token of `set_term`."""
    keys, tag = partition_keys(prefix, partition), partition if cluster else None
    names = (keys.log, keys.meta, keys.marks, ended_sources_key(prefix, tag), terms_key(prefix, tag))
    values = (b"%d" % source, b"%d" % backlog, term.encode())
    return b"".join(map(bulk, (b"EVALSHA", digest, b"5", *names, *values)))


def append_packet(start: bytes, heads: Sequence[bytes], messages: Sequence[bytes], *, count: int) -> bytes:
    """Return an append for `send_packet`; one reply. `start`: of `append_start`.

    `heads`: LP, first seq, count per run, as bulk numbers. `messages`: `count` messages, each the bulk strings facts,
    key, body.
    """
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
    """Return an append with dedup ids; one reply.

    `chunks`: LP, seq, token, facts, key, body per message, as bulk strings.
    """
    start = _append_once_start(connection.digest("log_append_once"), prefix, partition, source, backlog, window_ms)
    return b"".join((b"*%d\r\n" % (13 + 6 * count), start, bulk_number(count), *chunks))


def message_packet(facts: bytes, key: bytes, body: bytes) -> bytes:
    """Return one message of an append packet."""
    return b"$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(facts), facts, len(key), key, len(body), body)


def marks_packet(connection: NodeConnection, prefix: str, partition: int, source: int, lps: Sequence[int]) -> bytes:
    """Return a request for a partition's state and marks."""
    words = marks_command(connection, prefix, partition, [b"%d:%d" % (source, lp) for lp in lps])
    return b"*%d\r\n" % len(words) + b"".join(map(bulk, words))


def wait_aof_packet(timeout_ms: int) -> bytes:
    """Return a WAITAOF request for this server's file; its reply counts it, then replicas."""
    return b"*4\r\n" + bulk(b"WAITAOF") + bulk_number(1) + bulk_number(0) + bulk_number(timeout_ms)


def command_packet(words: Sequence[Any]) -> bytes:
    """Return a command of bytes, numbers and text."""
    encoded = (word if isinstance(word, bytes) else str(word).encode() for word in words)
    return b"*%d\r\n" % len(words) + b"".join(map(bulk, encoded))


def wait_packet(replicas: int, timeout_ms: int) -> bytes:
    """Return a WAIT request; its reply counts replicas."""
    return b"*3\r\n" + bulk(b"WAIT") + bulk_number(replicas) + bulk_number(timeout_ms)
