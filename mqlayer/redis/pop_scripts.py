"""Typed calls of ordered pop's scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from mqlayer.domain.key_classes import KeyClassRule
from mqlayer.domain.message import Record
from mqlayer.domain.rates import RateShare
from mqlayer.redis.keys import group_keys, outcomes_key, partition_keys, pop_keys, rate_key
from mqlayer.redis.node_connection import Command, NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import Fenced, Refused

BATCH_LIMIT: Final = 500
"""Messages per call that gives or settles."""

Scope = Literal["partition", "key"]
SettleAction = Literal["ack", "park", "nack", "return", "extend"]


class PopClasses(NamedTuple):
    """Key classes of a pop group, and their limits. `concurrency`: keys out, None for no limit."""

    rule: KeyClassRule
    concurrency: int | None = None
    rate: RateShare | None = None


@dataclass(frozen=True, slots=True)
class PopGroupPartition:
    """A pop group at a partition."""

    prefix: str
    partition: int
    group_id: int
    scope: Scope
    epoch: int
    start: int = 1
    seek: int = 0
    rate: RateShare | None = None
    classes: PopClasses | None = None


class ReceiveRequest(NamedTuple):
    """A receiver's request. `only_repeat`: only this attempt's former batch.

    `none_parked`: a batch's `parking`, under which Postgres had no parked key.
    """

    attempt_id: str
    limit: int
    bytes: int
    visibility_timeout_ms: int
    only_repeat: bool = False
    none_parked: int = 0


class PopBatch(NamedTuple):
    """A batch; `delivery_counts` include this delivery, `failures` are earlier ones.

    `parking`: 0, or keys may be parked, or unsettled messages dead.
    """

    batch: int
    records: Sequence[Record]
    delivery_counts: Sequence[int]
    failures: Sequence[int] = ()
    parking: int = 0
    committed: int = 0


class NoBatch(NamedTuple):
    """Nothing given. `more`: call again; `blocked`: an append changes nothing.

    `wait_ms`: until a queue is free, -1: none; `wakes`: last wake entry's number.
    """

    status: Literal["more", "empty", "blocked"]
    wait_ms: int
    next_offset: int
    wakes: int


class Drained(NamedTuple):
    """A sealed partition with all settled."""

    seal_id: str


class PopSettled(NamedTuple):
    """A settlement. `stale`: places in the call, from 1, of void tokens."""

    committed: int
    stale: Sequence[int]


def receive_command(connection: NodeConnection, group_partition: PopGroupPartition, request: ReceiveRequest) -> Command:
    """Ask for a batch."""
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
            pops.ready,
            pops.class_out,
            pops.class_rates,
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
        request.none_parked,
        *_classes(group_partition.classes),
    )


def _classes(classes: PopClasses | None) -> tuple[str, int, str, str] | tuple[()]:
    if classes is None:
        return ()
    rule = classes.rule
    of_rule = f"h{rule.header}" if rule.header else f"p{rule.separator.decode()}"
    per_s, size = (0.0, 0.0) if classes.rate is None else classes.rate[:2]
    return of_rule, classes.concurrency or 0, repr(float(per_s)), repr(float(size))


def receive_reply(reply: Any, address: str) -> PopBatch | NoBatch | Drained | Fenced | Refused:
    """Parse pop_receive's reply."""
    status, *facts = raise_for_reply(reply, address)
    if status == b"given":
        batch, counts, failures, parking, committed, flat = facts
        new = tuple.__new__
        fields = zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True)
        records = [new(Record, record) for record in fields]
        return PopBatch(batch, records, counts or [1] * len(records), failures, parking, committed)
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
    """Settle, return or extend up to BATCH_LIMIT `tokens` (batch, offset)."""
    keys, group = partition_keys(group_partition.prefix, group_partition.partition), _group(group_partition)
    pops = pop_keys(group_partition.prefix, group_partition.partition, group_partition.group_id)
    runs = _runs(tokens)
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
            pops.batches,
        ),
        group_partition.epoch,
        action,
        ms,
        len(runs) // 3,
        encoded_outcome,
        *runs,
    )


def _runs(tokens: Iterable[tuple[int, int]]) -> list[int]:
    """Join neighbours: batch, first and last offset of each run, in the tokens' order."""
    runs: list[int] = []
    for batch, offset in tokens:
        if runs and runs[-1] == offset - 1 and runs[-3] == batch:
            runs[-1] = offset
        else:
            runs += (batch, offset, offset)
    return runs


def pop_settle_reply(reply: Any, address: str) -> PopSettled | Fenced | Refused:
    """Parse pop_settle's reply."""
    status, *facts = raise_for_reply(reply, address)
    if status == b"settled":
        return PopSettled(*facts)
    if status == b"fenced":
        return Fenced(facts[0])
    return Refused(status.decode(), str(facts[0]) if facts else "")


def _group(group_partition: PopGroupPartition) -> Any:
    return group_keys(group_partition.prefix, group_partition.partition, group_partition.group_id)
