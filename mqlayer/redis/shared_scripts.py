"""Typed calls of shared groups' scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from mqlayer.domain.message import Record, records_of
from mqlayer.domain.offsets import OffsetRange
from mqlayer.redis.keys import GroupKeys, PartitionKeys, PopKeys, group_keys, outcomes_key, partition_keys, pop_keys
from mqlayer.redis.node_connection import Command, NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import FailureHistory, Fenced, Refused, failures_of

AT_ONCE: Final = 500
"""Messages per call that gives, returns, extends, reclaims."""
SETTLE_LIMIT: Final = 1_000
"""Messages per settling call."""


@dataclass(frozen=True, slots=True)
class SharedGroupPartition:
    """A shared group at a partition."""

    prefix: str
    partition: int
    group_id: int
    epoch: int
    start: int = 1
    seek: int = 0

    @property
    def log(self) -> bytes:
        """The stream's key."""
        return partition_keys(self.prefix, self.partition).log


class EpochInForce(NamedTuple):
    """The epoch in force; `due_in_ms`: -1 if none is due; `deferred`: how many messages are."""

    committed: int
    due_in_ms: int
    newly_acquired: bool
    deferred: int = 0


class SharedDrained(NamedTuple):
    """A sealed partition with all settled."""

    seal_id: str


class DueMessages(NamedTuple):
    """Messages to redeliver; `missing`: due offsets without a record: settle them."""

    records: Sequence[Record]
    failures: Sequence[FailureHistory | None]
    missing: Sequence[int]


class DeferredMessages(NamedTuple):
    """Deferred messages to handle; `after`: the class given last, `left`: how many are left."""

    due: DueMessages
    after: bytes
    left: int


class SharedSettled(NamedTuple):
    """`newly_settled`: messages not settled before."""

    committed: int
    newly_settled: int


def native_group(group_id: int) -> bytes:
    """Name the native consumer group."""
    return b"g%d" % group_id


def shared_acquire_command(
    connection: NodeConnection, group_partition: SharedGroupPartition, *, afresh: bool = False
) -> Command:
    """Put the epoch in force; `afresh` creates a missing native group."""
    keys, group, pops = _keys(group_partition)
    args = (
        native_group(group_partition.group_id),
        group_partition.epoch,
        group_partition.start,
        group_partition.seek,
        int(afresh),
    )
    names = (keys.meta, keys.log, group.lock, group.attempts, pops.due, pops.queues)
    return connection.script("shared_acquire", names, *args)


def shared_acquire_reply(reply: Any, address: str) -> EpochInForce | SharedDrained | Fenced | Refused:
    """Parse shared_acquire's reply."""
    status, *facts = raise_for_reply(reply, address)
    if status == b"unchanged":
        return EpochInForce(facts[0], facts[1], newly_acquired=False, deferred=facts[2])
    if status == b"acquired":
        return EpochInForce(facts[0], -1, newly_acquired=True)
    if status == b"drained":
        return SharedDrained(facts[0].decode())
    return _fenced_or_refused(status, facts)


def shared_read_command(
    group_partitions: Sequence[SharedGroupPartition], member: str, *, group_id: int, count: int, block_ms: int
) -> Command:
    """XREADGROUP on one node, up to `count` per partition."""
    logs = [group_partition.log for group_partition in group_partitions]
    block = ("BLOCK", block_ms) if block_ms else ()
    return ("XREADGROUP", "GROUP", native_group(group_id), member, "COUNT", count, *block,
            "STREAMS", *logs, *(b">" for _ in logs))  # fmt: skip


def is_missing_group(reply: Any) -> bool:
    """Whether a reply is NOGROUP."""
    return isinstance(reply, Exception) and str(reply).startswith("NOGROUP")


def shared_settle_command(
    connection: NodeConnection, group_partition: SharedGroupPartition, member: str, ranges: Sequence[OffsetRange], *,
    encoded_outcome: bytes = b"",
    command: bytes = b"",
) -> Command:  # fmt: skip
    """Settle up to SETTLE_LIMIT messages. `command`: a command record's entry id."""
    keys, group, pops = _keys(group_partition)
    outcomes = outcomes_key(group_partition.prefix, group_partition.partition, group_partition.group_id)
    flat = [offset for one in ranges for offset in one]
    return connection.script(
        "shared_settle", (keys.meta, keys.log, group.lock, group.attempts, pops.due, outcomes),
        native_group(group_partition.group_id), group_partition.epoch, member, command, encoded_outcome, len(ranges),
        *flat,
    )  # fmt: skip


def shared_settle_reply(reply: Any, address: str) -> SharedSettled | Fenced | Refused:
    """Parse shared_settle's reply."""
    status, *facts = raise_for_reply(reply, address)
    return SharedSettled(*facts) if status == b"settled" else _fenced_or_refused(status, facts)


def shared_due_command(
    connection: NodeConnection, group_partition: SharedGroupPartition, member: str, limit: int
) -> Command:
    """Give a member due messages."""
    return _script(connection, "shared_due", group_partition, member, limit)


def shared_due_reply(reply: Any, address: str) -> DueMessages | Fenced:
    """Parse shared_due's reply."""
    status, *facts = raise_for_reply(reply, address)
    return Fenced(facts[0]) if status == b"fenced" else _due_messages(*facts)


def shared_defer_command(
    connection: NodeConnection,
    group_partition: SharedGroupPartition,
    member: str,
    messages: Sequence[tuple[int, bytes]],
) -> Command:
    """Give back up to AT_ONCE messages (offset, class) until their class's turn."""
    keys, group, pops = _keys(group_partition)
    flat = [fact for message in messages for fact in message]
    args = (native_group(group_partition.group_id), group_partition.epoch, member, len(messages), *flat)
    return connection.script("shared_defer", (keys.log, group.lock, pops.due, pops.queues), *args)


def shared_deferred_command(
    connection: NodeConnection,
    group_partition: SharedGroupPartition,
    member: str,
    limit: int,
    *,
    each: int,
    after: bytes,
    named: Iterable[tuple[bytes, int]],
) -> Command:
    """Give a member deferred messages: `each` of a class, or as many as `named`."""
    flat = [fact for one in named for fact in one]
    return _script(connection, "shared_deferred", group_partition, member, limit, each, after, *flat, indexed=True)


def shared_deferred_reply(reply: Any, address: str) -> DeferredMessages | Fenced:
    """Parse shared_deferred's reply."""
    status, *facts = raise_for_reply(reply, address)
    return Fenced(facts[0]) if status == b"fenced" else DeferredMessages(_due_messages(*facts[:3]), *facts[3:])


def shared_nack_command(
    connection: NodeConnection,
    group_partition: SharedGroupPartition,
    member: str,
    messages: Iterable[tuple[int, int, int | None]],
) -> Command:
    """Return messages: offset, delay in ms, failed attempts (None: as noted)."""
    flat = [fact for offset, ms, failed in messages for fact in (offset, ms, "" if failed is None else failed)]
    return _script(connection, "shared_nack", group_partition, member, len(flat) // 3, *flat)


def shared_attempt_command(
    connection: NodeConnection, group_partition: SharedGroupPartition, member: str, offset: int
) -> Command:
    """Count an attempt at its start."""
    keys, group, _ = _keys(group_partition)
    args = (native_group(group_partition.group_id), group_partition.epoch, member, offset)
    return connection.script("shared_attempt", (keys.log, group.lock, group.attempts), *args)


def shared_attempt_reply(reply: Any, address: str) -> int | None:
    """Return the attempts; None: another member has the message."""
    status, *facts = raise_for_reply(reply, address)
    return facts[0] if status == b"started" else None


def shared_extend_command(
    connection: NodeConnection, group_partition: SharedGroupPartition, member: str, offsets: Sequence[int]
) -> Command:
    """Extend up to AT_ONCE messages."""
    keys, group, _ = _keys(group_partition)
    args = (native_group(group_partition.group_id), group_partition.epoch, member, *offsets)
    return connection.script("shared_extend", (keys.log, group.lock), *args)


def shared_extend_reply(reply: Any, address: str) -> Sequence[int] | Fenced:
    """Return offsets that the member lost."""
    status, fact = raise_for_reply(reply, address)
    return Fenced(fact) if status == b"fenced" else fact


def shared_reclaim_command(
    connection: NodeConnection, group_partition: SharedGroupPartition, visibility_timeout_ms: int, member: str = ""
) -> Command:
    """Reclaim messages of silent members, or of one."""
    return _script(connection, "shared_reclaim", group_partition, visibility_timeout_ms, AT_ONCE, member, indexed=True)


def shared_count_reply(reply: Any, address: str) -> int | Fenced | Refused:
    """Return how many messages became due."""
    status, *facts = raise_for_reply(reply, address)
    return facts[0] if status in (b"returned", b"reclaimed") else _fenced_or_refused(status, facts)


def _script(
    connection: NodeConnection, name: str, group_partition: SharedGroupPartition, *args: Any, indexed: bool = False
) -> Command:
    keys, group, pops = _keys(group_partition)
    names = (keys.log, group.lock, group.attempts, pops.due, *((pops.queues,) if indexed else ()))
    return connection.script(name, names, native_group(group_partition.group_id), group_partition.epoch, *args)


def _keys(group_partition: SharedGroupPartition) -> tuple[PartitionKeys, GroupKeys, PopKeys]:
    prefix, partition, group_id = group_partition.prefix, group_partition.partition, group_partition.group_id
    group = group_keys(prefix, partition, group_id)
    return partition_keys(prefix, partition), group, pop_keys(prefix, partition, group_id)


def _due_messages(entries: Sequence[Any], notes: Sequence[bytes], missing: Sequence[int]) -> DueMessages:
    return DueMessages(records_of(entries), [failures_of(noted) if noted else None for noted in notes], missing)


def _fenced_or_refused(status: bytes, facts: Sequence[Any]) -> Fenced | Refused:
    return Fenced(facts[0]) if status == b"fenced" else Refused(status.decode(), str(facts[0]) if facts else "")
