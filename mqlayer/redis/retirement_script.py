"""Typed call of group_forget."""

from __future__ import annotations

from typing import Any

from mqlayer.redis.keys import group_keys, outcomes_key, partition_keys, pop_keys, rate_key
from mqlayer.redis.node_connection import Command, NodeConnection, raise_for_reply


def group_forget_command(
    connection: NodeConnection,
    prefix: str,
    partition: int,
    group_id: int,
    epoch: int,
    *,
    for_good: bool,
    archived: bool,
) -> Command:
    """Remove a retired group's keys; `for_good`: its lock too."""
    group, pop = group_keys(prefix, partition, group_id), pop_keys(prefix, partition, group_id)
    of_partition = partition_keys(prefix, partition)
    keys = (
        of_partition.meta,
        group.lock,
        outcomes_key(prefix, partition, group_id),
        of_partition.log,
        group.acks,
        group.attempts,
        *pop,
        rate_key(prefix, partition, group_id),
    )
    return connection.script("group_forget", keys, epoch, int(for_good), int(archived))


def group_forget_reply(reply: Any, address: str) -> str:
    """Return the status."""
    return str(raise_for_reply(reply, address)[0].decode())
