"""Names of all Redis keys; nothing else makes them.

All keys of a partition carry one hash tag, so they live in one cluster slot and scripts may touch them together;
different partitions have different tags. Groups are named by their id: a name may be given again, an id never.

```text
<prefix>:{<partition>}:log                  stream  records, entry id <offset>-0
<prefix>:{<partition>}:meta                 hash    state, topic, lp_from, lp_to, next, first; of route changes:
                                                    change, sealed_for, seal, lost
<prefix>:{<partition>}:marks                hash    <source>:<lp> -> highest seq in the partition
<prefix>:{<partition>}:ids                  hash    dedup id, hashed -> where the first message with it is
<prefix>:{<partition>}:ages                 zset    the same -> ms when it came
<prefix>:{<partition>}:g<group>:lock        hash    owner, epoch, refreshed_at, committed, base, top, seek,
outcome_count
<prefix>:{<partition>}:g<group>:acks        string  ack bitmap, bit i is offset base + i
<prefix>:{<partition>}:g<group>:attempts    hash    offset -> <failed attempts>:<ms of the first>:<ms of the last>
<prefix>:{<partition>}:g<group>:outcomes    stream  what became of offsets (archived topics); id <epoch>-<outcome_count>
<prefix>:{<partition>}:g<group>:rate        hash    left, at_us: what may be begun of the group's rate (see
rate_acquire)

of a node as a whole (nodes are no members of a cluster):
<prefix>:ended                              set     outboxes' sources that are ended: nothing is appended under them
<prefix>:terms                              hash    outbox's source -> the term of its Postgres that counts

of a group with ordered pop, besides (see pop_receive):
<prefix>:{<partition>}:g<group>:pops        hash    offset -> <batch>:<ms when it is visible>:<queue>
<prefix>:{<partition>}:g<group>:queues      zset    <length of queue><queue><offset> of what is not settled
<prefix>:{<partition>}:g<group>:due         zset    queue -> ms when it may be given out
<prefix>:{<partition>}:g<group>:batches     hash    attempt id -> <batch>:<offsets>
<prefix>:{<partition>}:g<group>:wake        stream  one entry, whose id is the lock's `wake_count`
```
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple


class PartitionKeys(NamedTuple):
    """The keys of a partition itself."""

    log: bytes
    meta: bytes
    marks: bytes
    ids: bytes
    ages: bytes


class GroupKeys(NamedTuple):
    """The keys of a group at a partition."""

    lock: bytes
    acks: bytes
    attempts: bytes


class PopKeys(NamedTuple):
    """What a group with ordered pop has at a partition besides its GroupKeys."""

    pops: bytes
    queues: bytes
    due: bytes
    batches: bytes
    wake: bytes


@cache
def partition_keys(prefix: str, partition: int) -> PartitionKeys:
    """Return the keys of a partition."""
    stem = f"{prefix}:{{{partition}}}:".encode()
    return PartitionKeys(stem + b"log", stem + b"meta", stem + b"marks", stem + b"ids", stem + b"ages")


@cache
def ended_sources_key(prefix: str) -> bytes:
    """Return the set of the outboxes' sources under which a node takes nothing any more."""
    return f"{prefix}:ended".encode()


@cache
def terms_key(prefix: str) -> bytes:
    """Return the hash of the terms in which outboxes must have been read for a node to take what was read."""
    return f"{prefix}:terms".encode()


@cache
def group_keys(prefix: str, partition: int, group_id: int) -> GroupKeys:
    """Return the keys of a group at a partition."""
    stem = f"{prefix}:{{{partition}}}:g{group_id}:".encode()
    return GroupKeys(stem + b"lock", stem + b"acks", stem + b"attempts")


@cache
def pop_keys(prefix: str, partition: int, group_id: int) -> PopKeys:
    """Return the keys that a group with ordered pop has besides."""
    stem = f"{prefix}:{{{partition}}}:g{group_id}:".encode()
    return PopKeys(stem + b"pops", stem + b"queues", stem + b"due", stem + b"batches", stem + b"wake")


@cache
def outcomes_key(prefix: str, partition: int, group_id: int) -> bytes:
    """Return the stream of what became of a partition's messages for a group, until an archiver has fetched it."""
    return f"{prefix}:{{{partition}}}:g{group_id}:outcomes".encode()


@cache
def rate_key(prefix: str, partition: int, group_id: int) -> bytes:
    """Return the bucket that holds a partition's share of a group's rate."""
    return f"{prefix}:{{{partition}}}:g{group_id}:rate".encode()
