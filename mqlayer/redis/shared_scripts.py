"""The scripts of shared consumption: one typed call for each, as in `partition_scripts`; and the native group they
guard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from mqlayer.domain.message import Record, records_of
from mqlayer.domain.offsets import OffsetRange
from mqlayer.redis.keys import group_keys, outcomes_key, partition_keys, pop_keys
from mqlayer.redis.node_connection import Command, NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import FailureHistory, Fenced, Refused, failures_of

AT_ONCE: Final = 500
"""How many messages one call gives, gives back, keeps or reclaims, at most."""
SETTLE_LIMIT: Final = 1_000
"""How many messages one call settles, at most."""


@dataclass(frozen=True, slots=True)
class SharedGroupPartition:
    """A shared group at a partition, as Postgres says it: under which epoch, and where it starts."""

    prefix: str
    partition: int
    group_id: int
    epoch: int
    start: int = 1
    seek: int = 0

    @property
    def log(self) -> bytes:
        """The key of the partition's records."""
        return partition_keys(self.prefix, self.partition).log


class EpochInForce(NamedTuple):
    """The epoch is in force. `fresh`: since this call; `due_in_ms`: until something is due again, -1 where nothing
    is."""

    committed: int
    due_in_ms: int
    newly_acquired: bool


class SharedDrained(NamedTuple):
    """Everything before the command record of a sealed partition is settled."""

    seal_id: str


class DueMessages(NamedTuple):
    """Messages that are given again, each with what is noted of its former attempts.

    `missing`: offsets of those that were due and are not there: they are to be settled.
    """

    records: Sequence[Record]
    failures: Sequence[FailureHistory | None]
    missing: Sequence[int]


class SharedSettled(NamedTuple):
    """Done; so many messages, `fresh`, were not settled before."""

    committed: int
    newly_settled: int


def native_group(group_id: int) -> bytes:
    """Return the name of a shared group's native consumer group, the same in all partitions."""
    return b"g%d" % group_id


def shared_acquire_command(
    connection: NodeConnection, group_partition: SharedGroupPartition, *, afresh: bool = False
) -> Command:
    """Return the command that puts the place's epoch in force; `afresh` makes the native group where it is missing."""
    keys, group, due = _keys(group_partition)
    args = (
        native_group(group_partition.group_id),
        group_partition.epoch,
        group_partition.start,
        group_partition.seek,
        int(afresh),
    )
    return connection.script("shared_acquire", (keys.meta, keys.log, group.lock, group.attempts, due), *args)


def shared_acquire_reply(reply: Any, address: str) -> EpochInForce | SharedDrained | Fenced | Refused:
    """Return what shared_acquire says."""
    status, *facts = raise_for_reply(reply, address)
    if status == b"unchanged":
        return EpochInForce(facts[0], facts[1], newly_acquired=False)
    if status == b"acquired":
        return EpochInForce(facts[0], -1, newly_acquired=True)
    if status == b"drained":
        return SharedDrained(facts[0].decode())
    return _fenced_or_refused(status, facts)


def shared_read_command(
    group_partitions: Sequence[SharedGroupPartition], member: str, *, group_id: int, count: int, block_ms: int
) -> Command:
    """Return the native command that reads new messages of partitions on one node, up to `count` of each."""
    logs = [group_partition.log for group_partition in group_partitions]
    block = ("BLOCK", block_ms) if block_ms else ()
    return ("XREADGROUP", "GROUP", native_group(group_id), member, "COUNT", count, *block,
            "STREAMS", *logs, *(b">" for _ in logs))  # fmt: skip


def is_missing_group(reply: Any) -> bool:
    """Say whether a reply is the server's "no such consumer group"."""
    return isinstance(reply, Exception) and str(reply).startswith("NOGROUP")


def shared_settle_command(
    connection: NodeConnection, group_partition: SharedGroupPartition, member: str, ranges: Sequence[OffsetRange], *,
    encoded_outcome: bytes = b"",
    command: bytes = b"",
) -> Command:  # fmt: skip
    """Return the command that settles ranges of SETTLE_LIMIT messages at most; `encoded_outcome`: see `outcomes`.

    `command`: the entry id of a command record that was read.
    """
    keys, group, due = _keys(group_partition)
    outcomes = outcomes_key(group_partition.prefix, group_partition.partition, group_partition.group_id)
    flat = [offset for one in ranges for offset in one]
    return connection.script(
        "shared_settle", (keys.meta, keys.log, group.lock, group.attempts, due, outcomes),
        native_group(group_partition.group_id), group_partition.epoch, member, command, encoded_outcome, len(ranges),
        *flat,
    )  # fmt: skip


def shared_settle_reply(reply: Any, address: str) -> SharedSettled | Fenced | Refused:
    """Return what shared_settle says."""
    status, *facts = raise_for_reply(reply, address)
    return SharedSettled(*facts) if status == b"settled" else _fenced_or_refused(status, facts)


def shared_due_command(
    connection: NodeConnection, group_partition: SharedGroupPartition, member: str, limit: int
) -> Command:
    """Return the command that gives a member what is due again."""
    return _script(connection, "shared_due", group_partition, member, limit)


def shared_due_reply(reply: Any, address: str) -> DueMessages | Fenced:
    """Return what shared_due says."""
    status, *facts = raise_for_reply(reply, address)
    if status == b"fenced":
        return Fenced(facts[0])
    entries, notes, missing = facts
    return DueMessages(records_of(entries), [failures_of(noted) if noted else None for noted in notes], missing)


def shared_nack_command(
    connection: NodeConnection,
    group_partition: SharedGroupPartition,
    member: str,
    messages: Iterable[tuple[int, int, int | None]],
) -> Command:
    """Return the command that gives messages back: offset, ms to wait, failed attempts by now (None: as noted)."""
    flat = [fact for offset, ms, failed in messages for fact in (offset, ms, "" if failed is None else failed)]
    return _script(connection, "shared_nack", group_partition, member, len(flat) // 3, *flat)


def shared_attempt_command(
    connection: NodeConnection, group_partition: SharedGroupPartition, member: str, offset: int
) -> Command:
    """Return the command that counts an attempt before its message is started."""
    keys, group, _ = _keys(group_partition)
    args = (native_group(group_partition.group_id), group_partition.epoch, member, offset)
    return connection.script("shared_attempt", (keys.log, group.lock, group.attempts), *args)


def shared_attempt_reply(reply: Any, address: str) -> int | None:
    """Return the attempts by now, this one included; None where the message is not this member's any more."""
    status, *facts = raise_for_reply(reply, address)
    return facts[0] if status == b"started" else None


def shared_extend_command(
    connection: NodeConnection, group_partition: SharedGroupPartition, member: str, offsets: Sequence[int]
) -> Command:
    """Return the command that says which messages a member still has, AT_ONCE at most."""
    keys, group, _ = _keys(group_partition)
    args = (native_group(group_partition.group_id), group_partition.epoch, member, *offsets)
    return connection.script("shared_extend", (keys.log, group.lock), *args)


def shared_extend_reply(reply: Any, address: str) -> Sequence[int] | Fenced:
    """Return which of the messages are this member's no more."""
    status, fact = raise_for_reply(reply, address)
    return Fenced(fact) if status == b"fenced" else fact


def shared_reclaim_command(
    connection: NodeConnection, group_partition: SharedGroupPartition, visibility_timeout_ms: int
) -> Command:
    """Return the command that takes messages from members that were not heard of for so long."""
    keys, group, due = _keys(group_partition)
    args = (native_group(group_partition.group_id), group_partition.epoch, visibility_timeout_ms, AT_ONCE)
    return connection.script("shared_reclaim", (keys.log, group.lock, group.attempts, due), *args)


def shared_count_reply(reply: Any, address: str) -> int | Fenced | Refused:
    """Return how many messages shared_nack or shared_reclaim made due."""
    status, *facts = raise_for_reply(reply, address)
    return facts[0] if status in (b"returned", b"reclaimed") else _fenced_or_refused(status, facts)


def _script(connection: NodeConnection, name: str, group_partition: SharedGroupPartition, *args: Any) -> Command:
    keys, group, due = _keys(group_partition)
    return connection.script(
        name,
        (keys.log, group.lock, group.attempts, due),
        native_group(group_partition.group_id),
        group_partition.epoch,
        *args,
    )


def _keys(group_partition: SharedGroupPartition) -> tuple[Any, Any, bytes]:
    prefix, partition, group_id = group_partition.prefix, group_partition.partition, group_partition.group_id
    group = group_keys(prefix, partition, group_id)
    return partition_keys(prefix, partition), group, pop_keys(prefix, partition, group_id).due


def _fenced_or_refused(status: bytes, facts: Sequence[Any]) -> Fenced | Refused:
    return Fenced(facts[0]) if status == b"fenced" else Refused(status.decode(), str(facts[0]) if facts else "")
