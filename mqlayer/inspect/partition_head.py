"""The head of a partition for a group: its first unsettled message, the gaps behind it, and the seal that ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from mqlayer.domain.offsets import OffsetRange, as_ranges
from mqlayer.domain.routing import Lp
from mqlayer.errors import MqlayerError, NotFound
from mqlayer.inspect.group_facts import GroupFacts, PartitionFacts
from mqlayer.inspect.group_status import GroupStatus, PartitionStatus, group_statuses
from mqlayer.inspect.message_status import ATTEMPTS_LIMIT, GroupAttempt, hidden_from
from mqlayer.inspect.parked_status import ParkedKeyStatus, parked_key
from mqlayer.inspect.stream_search import read_record
from mqlayer.inspect.topic_reader import StoredMessage
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import group_keys
from mqlayer.redis.node_connection import Node, raise_for_reply
from mqlayer.redis.read_scripts import GroupPosition
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

GAP_BYTES: Final = 8_192
"""Of the ack bitmap: 65,536 offsets."""
ATTEMPTS_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class PartitionEnd:
    """A change that ends a partition. `sealed_at`, `next_offset`: None before the seal; `cut`: messages were lost."""

    change_id: int
    version: int
    kind: str
    state: str
    actor: str
    planned_at: datetime
    sealed_at: datetime | None
    next_offset: int | None
    unreachable: bool | None
    cut: bool | None
    successors: Sequence[int]


@dataclass(frozen=True, slots=True)
class PartitionHead:
    """A group in a partition. `parents`: undrained ones; `message`: its head, without body and headers if `hidden`.

    `attempts`: its last recorded failures; `gaps`: unsettled ranges between settled offsets up to `gaps_upto`, None
    where the group keeps no bitmap.
    """

    group: GroupStatus
    status: PartitionStatus
    parents: Sequence[PartitionStatus]
    message: StoredMessage | None
    body_bytes: int
    hidden: bool
    parked: ParkedKeyStatus | None
    attempts: Sequence[GroupAttempt]
    gaps: Sequence[OffsetRange] | None
    gaps_upto: int
    end: PartitionEnd | None


def partition_head(runtime: Runtime, topic: str, name: str, partition: int, *, bodies: bool = True) -> PartitionHead:
    """Return a partition's head for a group; `bodies`: with them, if the role may see them. Raises NotFound."""
    (group,) = group_statuses(runtime, topic, name, partitions={partition}, count_keys=False)
    if not group.partitions:
        raise NotFound("partition", f"{topic}/{partition}", f"those there are: mqlayer group show {topic} {name}")
    (status,) = group.partitions
    behind = set(status.facts.behind)
    parents = (
        [] if not behind else group_statuses(runtime, topic, name, partitions=behind, count_keys=False)[0].partitions
    )
    hidden = not bodies or hidden_from(runtime.control) is not None
    message, size, gaps, upto = None, 0, None, 0
    if status.position is not None and not status.facts.drained:
        try:
            message, size, gaps, upto = _of_node(runtime, status, status.position, group.facts.mode, hidden=hidden)
        except MqlayerError:
            # The node fell silent in between: the page says so the next time.
            gaps = None
    parked = None
    if message is not None and message.key is not None:
        parked = parked_key(runtime.control, group.facts.group_id, Lp(message.identity.lp), message.key.encode())
    attempts = [] if message is None else _attempts(runtime.control, group.facts, message)
    end = _end(runtime.control, partition)
    return PartitionHead(group, status, parents, message, size, hidden, parked, attempts, gaps, upto, end)


def _of_node(
    runtime: Runtime, status: PartitionStatus, position: GroupPosition, mode: str, *, hidden: bool
) -> tuple[StoredMessage | None, int, Sequence[OffsetRange] | None, int]:
    node = next(one for one in load_nodes(runtime.control) if one.node_id == status.facts.node)
    message, size = None, 0
    if status.head is not None:
        with runtime.connection(node, RedisRole.VIEWER) as connection:
            record = read_record(connection, runtime.prefix, status.facts.partition, status.head.offset)
        if record is not None:
            size = len(record.body)
            message = StoredMessage.of(status.facts.partition, record)
            message = replace(message, headers={}, body=b"") if hidden else message
    if mode != "exclusive":
        return message, size, None, 0
    gaps, upto = _gaps(runtime, node, status.facts, position)
    return message, size, gaps, upto


def _gaps(
    runtime: Runtime, node: Node, facts: PartitionFacts, position: GroupPosition
) -> tuple[Sequence[OffsetRange], int]:
    if not position.settled:
        return [], position.next_offset - 1
    lock, acks, _ = group_keys(runtime.prefix, facts.partition, facts.group_id)
    with runtime.connection(node, RedisRole.VIEWER) as connection:
        replies = connection.call([("HMGET", lock, "base", "top"), ("GETRANGE", acks, 0, GAP_BYTES - 1)])
    (base, top), bits = (raise_for_reply(reply, node.address) for reply in replies)
    return _unsettled(int(base or 0), int(top or 0), bits, position)


def _unsettled(base: int, top: int, bits: Any, position: GroupPosition) -> tuple[Sequence[OffsetRange], int]:
    past = min(top, base + 8 * len(bits), position.next_offset)
    open_ones = (
        offset
        for offset in range(max(position.position, base), past)
        if not bits[(offset - base) >> 3] & (0x80 >> ((offset - base) & 7))
    )
    return as_ranges(open_ones), past - 1


def _attempts(database: Database, group: GroupFacts, message: StoredMessage) -> list[GroupAttempt]:
    facts = {"group_id": group.group_id, "limit": ATTEMPTS_LIMIT} | message.identity._asdict()
    with database.connection() as connection:
        rows = connection.execute(query("attempts_of"), facts).fetchall()
    return [GroupAttempt(group.name, *row) for row in rows[-ATTEMPTS_SHOWN:]]


def _end(database: Database, partition: int) -> PartitionEnd | None:
    with database.connection() as connection:
        row = connection.execute(query("inspected_seal"), {"partition": partition}).fetchone()
    return None if row is None else PartitionEnd(*row)
