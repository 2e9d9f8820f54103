"""The scripts of ordered pop: one typed call for each, as in `partition_scripts`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from mqlayer.domain.message import Record
from mqlayer.domain.rates import RateShare
from mqlayer.redis.keys import group_keys, outcomes_key, partition_keys, pop_keys, rate_key
from mqlayer.redis.node_connection import Command, NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import Fenced, Refused

BATCH_LIMIT: Final = 500
"""How many messages one call gives out or settles, at most: the width of what a batch is tracked by."""

Scope = Literal["partition", "key"]
SettleAction = Literal["ack", "nack", "extend"]


@dataclass(frozen=True, slots=True)
class PopGroupPartition:
    """A group with ordered pop at a partition, as Postgres says it: under which epoch, and where it starts.

    `rate`: what this partition gives out of the group's rate.
    """

    prefix: str
    partition: int
    group_id: int
    scope: Scope
    epoch: int
    start: int = 1
    seek: int = 0
    rate: RateShare | None = None


class ReceiveRequest(NamedTuple):
    """What a receiver asks for. `only_repeat`: nothing but a batch that the same attempt was given before."""

    attempt_id: str
    limit: int
    bytes: int
    visibility_timeout_ms: int
    only_repeat: bool = False


class PopBatch(NamedTuple):
    """A batch, and how often each of its records was given out, this time included."""

    batch: int
    records: Sequence[Record]
    delivery_counts: Sequence[int]


class NoBatch(NamedTuple):
    """Nothing to give out. `more`: there is more to look at; `blocked`: appending makes no difference.

    `wait_ms`: until a queue is free again, -1 for none; `wakes`: number of the last entry that told of one.
    """

    status: Literal["more", "empty", "blocked"]
    wait_ms: int
    next_offset: int
    wakes: int


class Drained(NamedTuple):
    """Everything before the command record of a sealed partition is settled."""

    seal_id: str


class PopSettled(NamedTuple):
    """What was said was taken, but for the messages at these places of the call, from 1: another batch has them since,
    or none.
    """

    committed: int
    stale: Sequence[int]


def receive_command(connection: NodeConnection, group_partition: PopGroupPartition, request: ReceiveRequest) -> Command:
    """Return the command that asks for a batch."""
    keys, group = partition_keys(group_partition.prefix, group_partition.partition), _group(group_partition)
    pops = pop_keys(group_partition.prefix, group_partition.partition, group_partition.group_id)
    return connection.script(
        "pop_receive",
        (
            keys.meta,
            keys.log,
            *group,
            pops.pops,
            pops.queues,
            pops.due,
            pops.batches,
            rate_key(group_partition.prefix, group_partition.partition, group_partition.group_id),
        ),
        group_partition.epoch,
        group_partition.start,
        group_partition.seek,
        group_partition.scope,
        request.limit,
        request.bytes,
        request.visibility_timeout_ms,
        request.attempt_id,
        int(request.only_repeat),
        *((0, 0) if group_partition.rate is None else map(repr, map(float, group_partition.rate[:2]))),
    )


def receive_reply(reply: Any, address: str) -> PopBatch | NoBatch | Drained | Fenced | Refused:
    """Return what pop_receive says."""
    status, *facts = raise_for_reply(reply, address)
    if status == b"given":
        batch, flat = facts
        fields = zip(flat[::5], flat[2::5], flat[3::5], flat[4::5], strict=True)
        return PopBatch(batch, [Record(*record) for record in fields], flat[1::5])
    if status == b"drained":
        return Drained(facts[0].decode())
    if status == b"fenced":
        return Fenced(facts[0])
    if status == b"absent":
        return Refused("absent", "")
    return NoBatch(status.decode(), *facts)


def pop_settle_command(
    connection: NodeConnection,
    group_partition: PopGroupPartition,
    action: SettleAction,
    tokens: Iterable[tuple[int, int]],
    *,
    ms: int = 0,
    encoded_outcome: bytes = b"",
) -> Command:
    """Return the command that says what became of messages; `tokens`: batch and offset of each, at most BATCH_LIMIT.

    `encoded_outcome`: see `outcomes`.
    """
    keys, group = partition_keys(group_partition.prefix, group_partition.partition), _group(group_partition)
    pops = pop_keys(group_partition.prefix, group_partition.partition, group_partition.group_id)
    flat = [number for token in tokens for number in token]
    return connection.script(
        "pop_settle",
        (
            keys.meta,
            *group,
            pops.pops,
            pops.queues,
            pops.due,
            pops.wake,
            outcomes_key(group_partition.prefix, group_partition.partition, group_partition.group_id),
            keys.log,
        ),
        group_partition.epoch,
        action,
        ms,
        len(flat) // 2,
        encoded_outcome,
        *flat,
    )


def pop_settle_reply(reply: Any, address: str) -> PopSettled | Fenced | Refused:
    """Return what pop_settle says."""
    status, *facts = raise_for_reply(reply, address)
    if status == b"settled":
        return PopSettled(*facts)
    if status == b"fenced":
        return Fenced(facts[0])
    return Refused(status.decode(), str(facts[0]) if facts else "")


def _group(group_partition: PopGroupPartition) -> Any:
    return group_keys(group_partition.prefix, group_partition.partition, group_partition.group_id)
