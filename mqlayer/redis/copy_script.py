"""Typed call of group_copy."""

from __future__ import annotations

from typing import Any

from mqlayer.errors import NodeNotArmed
from mqlayer.redis.keys import group_keys, partition_keys
from mqlayer.redis.node_connection import Command, NodeConnection, raise_for_reply


def group_copy_command(
    connection: NodeConnection,
    prefix: str,
    partition: int,
    groups: tuple[int, int],
    epoch: int,
    *,
    start: int,
    seek: int,
) -> Command:
    """Copy a group's position; `groups`: from, to. `start`, `seek`: of the first."""
    of_partition, (source, new) = partition_keys(prefix, partition), groups
    keys = (
        of_partition.meta,
        of_partition.log,
        *group_keys(prefix, partition, source),
        *group_keys(prefix, partition, new),
    )
    return connection.script("group_copy", keys, epoch, start, seek)


def group_copy_reply(reply: Any, address: str) -> int:
    """Return the new group's committed offset. Raises NodeNotArmed if the partition is missing."""
    status, *facts = raise_for_reply(reply, address)
    if status != b"copied":
        raise NodeNotArmed(address, "a partition is gone from it: the node lost data")
    return int(facts[0])
