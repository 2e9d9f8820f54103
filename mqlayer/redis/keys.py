"""Names of all Redis keys; no other module makes any.

A partition's keys, `<prefix>:{<partition>}:<name>`, share a hash tag, for scripts. Groups go by id: names may be
reused. Values: headers of mqlayer/lua/*.lua.

```text
log             stream  records, id <offset>-0
meta            hash    state, topic, lp_from, lp_to, next, first, change, sealed_for, seal, lost, lost_marks
marks           hash    <source>:<lp> -> highest seq
ids, ages       hash, zset  dedup token -> first position; -> ms
g<id>:lock      hash    owner, epoch, refreshed_at, committed, base, top, seek, outcome_count, crash_count, suspect;
                        pop: pop, wake_count, examined, withheld_until, packed, queued, parking,
                        unparked, class_turn, class_waits, class_swept; shared: shared, reclaimed_to
g<id>:acks      string  bitmap from base
g<id>:attempts  hash    offset -> attempts, times
g<id>:outcomes  stream  unfetched outcomes, archived topics
g<id>:rate      hash    left, at_us; g<id>:rate:<class>: the same of a key class
g<id>:pops, queues, batches, wake  hash, zset, hash, stream  ordered pop; shared: queues, deferred messages
g<id>:ready, class_out, class_rates  zset  ordered pop with key classes: queues that wait, keys that are out, rates
g<id>:due       zset    when a queue (pop) or message (shared) is due; shared: inf, deferred
<prefix>:ended  set     the node's ended outbox sources; on a cluster each partition's: ended
<prefix>:terms  hash    the node's source -> term; on a cluster each partition's: terms
```
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple


class PartitionKeys(NamedTuple):
    """A partition's keys."""

    log: bytes
    meta: bytes
    marks: bytes
    ids: bytes
    ages: bytes


class GroupKeys(NamedTuple):
    """A group's keys."""

    lock: bytes
    acks: bytes
    attempts: bytes


class PopKeys(NamedTuple):
    """Further keys of pop groups."""

    pops: bytes
    queues: bytes
    due: bytes
    batches: bytes
    wake: bytes
    ready: bytes
    class_out: bytes
    class_rates: bytes


@cache
def partition_keys(prefix: str, partition: int) -> PartitionKeys:
    """Return a partition's keys."""
    stem = f"{prefix}:{{{partition}}}:".encode()
    return PartitionKeys(stem + b"log", stem + b"meta", stem + b"marks", stem + b"ids", stem + b"ages")


@cache
def ended_sources_key(prefix: str, partition: int | None = None) -> bytes:
    """Return the `ended` set: the node's, or on a cluster a partition's."""
    return f"{prefix}:{_tag(partition)}ended".encode()


@cache
def terms_key(prefix: str, partition: int | None = None) -> bytes:
    """Return the `terms` hash: the node's, or on a cluster a partition's."""
    return f"{prefix}:{_tag(partition)}terms".encode()


def _tag(partition: int | None) -> str:
    return "" if partition is None else f"{{{partition}}}:"


@cache
def group_keys(prefix: str, partition: int, group_id: int) -> GroupKeys:
    """Return a group's keys."""
    stem = f"{prefix}:{{{partition}}}:g{group_id}:".encode()
    return GroupKeys(stem + b"lock", stem + b"acks", stem + b"attempts")


@cache
def pop_keys(prefix: str, partition: int, group_id: int) -> PopKeys:
    """Return a pop group's keys."""
    stem = f"{prefix}:{{{partition}}}:g{group_id}:".encode()
    names = (b"pops", b"queues", b"due", b"batches", b"wake", b"ready", b"class_out", b"class_rates")
    return PopKeys(*(stem + name for name in names))


@cache
def outcomes_key(prefix: str, partition: int, group_id: int) -> bytes:
    """Return the `outcomes` stream."""
    return f"{prefix}:{{{partition}}}:g{group_id}:outcomes".encode()


@cache
def rate_key(prefix: str, partition: int, group_id: int) -> bytes:
    """Return the `rate` bucket."""
    return f"{prefix}:{{{partition}}}:g{group_id}:rate".encode()


def class_rate_key(prefix: str, partition: int, group_id: int, name: bytes) -> bytes:
    """Return a key class's `rate` bucket."""
    return b"%b:%b" % (rate_key(prefix, partition, group_id), name)
