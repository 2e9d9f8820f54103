"""Typed calls of the scripts that keep a topic's limits of retention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mqlayer.domain.retention import Retention
from mqlayer.redis.keys import group_keys, outcomes_key, partition_keys, pop_keys
from mqlayer.redis.node_connection import Command, NodeConnection, raise_for_reply
from mqlayer.redis.outcomes import MAX_OUTCOMES
from mqlayer.redis.partition_scripts import GroupStart


class LogBound(NamedTuple):
    """The first record within limits; `before`: facts of the one before. `weighed`: the stream's size is known."""

    offset: int
    before: bytes
    weighed: bool


class DroppedPosition(NamedTuple):
    """A group's position; `dropped`: unsettled messages that it lost ever, `lost`: by this call."""

    offset: int
    dropped: int
    lost: int
    next_offset: int
    sealed: bool

    @property
    def drained(self) -> bool:
        """Whether it is at the command of a sealed partition."""
        return self.sealed and self.offset >= self.next_offset


def bound_command(
    connection: NodeConnection,
    prefix: str,
    partition: int,
    limits: Retention,
    *,
    starts: Sequence[GroupStart],
    floor: int,
    now_ms: int,
) -> Command:
    """Ask up to where records are beyond limits, below `floor` and the positions of `starts`."""
    keys = partition_keys(prefix, partition)
    locks = [group_keys(prefix, partition, start.group_id).lock for start in starts]
    facts = [fact for start in starts for fact in (start.seek, start.offset)]
    args = (floor, limits.retain_s * 1000, now_ms, limits.retain_bytes, limits.retain_messages, *facts)
    return connection.script("log_bound", (keys.meta, keys.log, *locks), *args)


def bound_reply(reply: Any, address: str) -> LogBound | None:
    """Return the bound, or None without the partition."""
    reply = raise_for_reply(reply, address)
    return LogBound(reply[1], reply[2], reply[3] == 1) if reply[0] == b"bound" else None


def drop_command(
    connection: NodeConnection, prefix: str, partition: int, start: GroupStart, bound: LogBound, *, archived: bool
) -> Command:
    """Move a group's position to a bound, and count its unsettled messages before it."""
    keys, group = partition_keys(prefix, partition), group_keys(prefix, partition, start.group_id)
    pops = pop_keys(prefix, partition, start.group_id)
    outcomes = outcomes_key(prefix, partition, start.group_id)
    return connection.script(
        "position_drop",
        (keys.meta, keys.log, *group, pops.pops, pops.queues, pops.due, pops.batches, outcomes),
        bound.offset,
        bound.before,
        start.offset,
        start.seek,
        MAX_OUTCOMES if archived else 0,
    )


def drop_reply(reply: Any, address: str) -> DroppedPosition | None:
    """Return the position, or None where nothing was changed: other records are there."""
    reply = raise_for_reply(reply, address)
    if reply[0] != b"position":
        return None
    position, dropped, lost, next_offset = reply[1:5]
    return DroppedPosition(position, dropped, lost, next_offset, reply[5] == b"sealed")
