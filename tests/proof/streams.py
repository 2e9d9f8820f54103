"""What partitions hold, read from Redis as the last witness of a run.

It takes records apart by itself, by the form that `mqlayer.domain.message` documents, so that it would notice if the
library wrote them differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import redis

from mqlayer.domain.message import NO_KEY
from mqlayer.redis.keys import partition_keys
from tests.proof.history import Append, Seal

CHUNK_RECORDS = 1_000
COMMAND = b"command"
"""What a record says in the place of an identity that closes its partition."""


def record_count(client: redis.Redis, prefix: str, partitions: Iterable[int]) -> int:
    """Return how many records the streams of these partitions hold."""
    counts: list[Any] = [client.xlen(partition_keys(prefix, partition).log) for partition in partitions]
    return sum(counts)


def read_partition(client: redis.Redis, prefix: str, partition: int, topic: str) -> Iterator[Append]:
    """Return all messages of a partition in the order of their offsets; a body's text is its value.

    The command of a sealed partition is none; that nothing is behind it (invariant 5) is checked here.
    """
    sealed = False
    for event in read_records(client, prefix, partition, topic):
        assert not sealed, f"partition {partition} goes on behind the command that sealed it: {event}"
        if isinstance(event, Append):
            yield event
        else:
            sealed = True


def read_records(client: redis.Redis, prefix: str, partition: int, topic: str) -> Iterator[Append | Seal]:
    """Return all records of a partition in the order of their offsets; a body's text is its value.

    The command record of a sealed one comes as a Seal: it is no message, and has no offset of its own.
    """
    log, after = partition_keys(prefix, partition).log, "-"
    info: Any = client.info("server")
    while entries := _entries(client, log, after):
        for entry_id, fields in entries:
            if fields[b"m"] == COMMAND:
                offset = int(entry_id.split(b"-")[0])
                yield Seal(topic=topic, partition=partition, offset=offset, run=info["run_id"])
                continue
            source, lp, seq, _ = fields[b"m"].split(b":", 3)
            yield Append(
                topic=topic,
                key=None if fields[b"k"] == NO_KEY else fields[b"k"].decode(),
                source=int(source),
                lp=int(lp),
                seq=int(seq),
                value=fields[b"b"].decode(),
                partition=partition,
                offset=int(entry_id.removesuffix(b"-0")),
                run=info["run_id"],
            )
        after = f"({entries[-1][0].decode()}"


def _entries(client: redis.Redis, log: bytes, after: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    entries: Any = client.xrange(log, min=after, count=CHUNK_RECORDS)
    return list(entries)
