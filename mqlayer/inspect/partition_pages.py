"""Messages a bounded page at a time: of a partition, the newest of a topic, and the bodies of such a page.

Nothing is settled, and no consumer notices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from mqlayer.domain.message import Identity, records_of
from mqlayer.domain.routing import NodeId
from mqlayer.errors import InvalidInput, MqlayerError, NotFound
from mqlayer.groups.start_positions import UndeletedPartition, undeleted_partitions
from mqlayer.inspect.message_life import MissingStep
from mqlayer.inspect.message_search import FoundMessage, found_of_record
from mqlayer.inspect.stream_search import OffsetBounds, StreamSearch
from mqlayer.inspect.topic_reader import PAGE_BYTES, StoredMessage
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection, raise_for_reply
from mqlayer.redis.read_scripts import RecordFilter, search_command, search_reply
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.runtime import Runtime

PAGE_LIMIT: Final = 500
PARTITIONS_LIMIT: Final = 16
"""Of a topic, that a page of its newest messages reads."""
TIME_RECORDS: Final = 20_000
"""Looked at to find a time in a partition."""


class PartitionPage(msgspec.Struct, frozen=True):
    """Messages of a partition in order. `first`, `past`: the kept offsets; `begins`, `ends`: the page's."""

    partition: int
    first: int
    past: int
    begins: int
    ends: int
    messages: Sequence[FoundMessage]

    def earlier(self, limit: int) -> int | None:
        """Return where the page before begins; None for none."""
        return max(self.first, self.begins - limit) if self.begins > self.first else None

    @property
    def later(self) -> int | None:
        """Where the next page begins; None for none."""
        return self.ends if self.ends < self.past else None


class NewestMessages(msgspec.Struct, frozen=True):
    """The newest messages of a topic, the latest first. `read`, `there`: partitions."""

    messages: Sequence[FoundMessage]
    read: int
    there: int
    missing: Sequence[MissingStep]


class _SearchedTopic(NamedTuple):
    topic_id: int
    body_limit: int
    partitions: Sequence[UndeletedPartition]


def partition_page(
    runtime: Runtime, topic: str, partition: int, *, offset: int | None = None, at: datetime | None = None, limit: int
) -> PartitionPage:
    """Return a page from an offset, from a time, or else the last one.

    Raises NotFound, InvalidInput, BudgetSpent, StoreUnavailable.
    """
    one = next((one for one in _topic(runtime, topic).partitions if one.partition == partition), None)
    if one is None:
        raise NotFound("partition", partition, f"see those that there are: mqlayer topic show {topic}")
    _check(limit)
    with closing(StreamSearch(runtime, records=TIME_RECORDS)) as search:
        first, past = search.bounds(one)
        begins = past - limit if offset is None else offset
        if at is not None:
            begins = search.offset_at(one, round(at.timestamp() * 1000))
        begins = min(max(begins, first), past)
        within = OffsetBounds(begins, min(past, begins + limit))
        records = [found.record for found in search.forward(one, RecordFilter(), within, limit)]
    messages = [found_of_record(partition, record) for record in records if not record.void]
    return PartitionPage(partition, first, past, begins, within.past, messages)


def newest_messages(runtime: Runtime, topic: str, *, limit: int) -> NewestMessages:
    """Return the newest messages of the newest partitions, PARTITIONS_LIMIT at most. Raises NotFound, InvalidInput."""
    _check(limit)
    there = _topic(runtime, topic).partitions
    chosen = there[-PARTITIONS_LIMIT:]
    messages: list[FoundMessage] = []
    missing: list[MissingStep] = []
    with NodePool.of_registered(runtime, RedisRole.VIEWER) as pool:
        for node, partitions in _by_node(chosen).items():
            try:
                messages += _newest(pool.to(node), runtime.prefix, partitions, limit)
            except MqlayerError as error:
                missing.append(MissingStep(f"messages of {len(partitions)} partitions", "not_searched", str(error)))
    messages.sort(key=lambda message: message.published_at, reverse=True)
    return NewestMessages(messages[:limit], len(chosen), len(there), missing)


def stored_messages(runtime: Runtime, topic: str, wanted: Iterable[FoundMessage]) -> Mapping[Identity, StoredMessage]:
    """Return messages with their bodies, up to PAGE_BYTES of these, as far as streams hold them.

    Messages of silent nodes are left out. Raises NotFound.
    """
    found = _topic(runtime, topic)
    nodes = {one.partition: one.node for one in found.partitions}
    at_once = max(1, PAGE_BYTES // found.body_limit)
    told: dict[Identity, StoredMessage] = {}
    by_node: dict[NodeId, list[FoundMessage]] = defaultdict(list)
    for one in wanted:
        if one.partition in nodes:
            by_node[nodes[one.partition]].append(one)
    left = PAGE_BYTES
    with NodePool.of_registered(runtime, RedisRole.VIEWER) as pool:
        for node, some in by_node.items():
            try:
                for message in _at_places(pool.to(node), runtime.prefix, some, at_once):
                    left -= len(message.body)
                    if left < 0:
                        return told
                    told[message.identity] = message
            except MqlayerError:
                continue
    return told


def _topic(runtime: Runtime, topic: str) -> _SearchedTopic:
    with runtime.control.connection() as connection:
        row = connection.execute(query("searched_topic"), {"topic": topic}).fetchone()
        if row is None:
            raise NotFound("topic", topic, "see those that there are: mqlayer topic list")
        return _SearchedTopic(row[0], row[3], undeleted_partitions(connection, row[0]))


def _by_node(partitions: Iterable[UndeletedPartition]) -> Mapping[NodeId, list[int]]:
    by_node: dict[NodeId, list[int]] = defaultdict(list)
    for one in partitions:
        by_node[one.node].append(one.partition)
    return by_node


def _newest(connection: NodeConnection, prefix: str, partitions: Sequence[int], limit: int) -> Iterator[FoundMessage]:
    address = connection.node.address
    replies = connection.call([("HMGET", partition_keys(prefix, one).meta, "first", "next") for one in partitions])
    bounds = [[int(text or 1) for text in raise_for_reply(reply, address)] for reply in replies]
    left = {
        one: OffsetBounds(max(first, past - limit), past) for one, (first, past) in zip(partitions, bounds, strict=True)
    }
    # A call ends early at large bodies.
    while left := {one: within for one, within in left.items() if within.first < within.past}:
        commands = [
            search_command(connection, prefix, one, RecordFilter(), first=first, past=past, limit=limit)
            for one, (first, past) in left.items()
        ]
        for one, reply in zip(list(left), connection.call(commands), strict=True):
            ahead, records = search_reply(reply, address)
            left[one] = OffsetBounds(ahead, left[one].past)
            yield from (found_of_record(one, each.record) for each in records if not each.record.void)


def _at_places(
    connection: NodeConnection, prefix: str, wanted: Sequence[FoundMessage], at_once: int
) -> Iterator[StoredMessage]:
    for at in range(0, len(wanted), at_once):
        some = wanted[at : at + at_once]
        logs = [(partition_keys(prefix, one.partition or 0).log, f"{one.offset}-0") for one in some]
        replies = connection.call([("XRANGE", log, place, place) for log, place in logs])
        for one, reply in zip(some, replies, strict=True):
            for record in records_of(raise_for_reply(reply, connection.node.address)):
                yield StoredMessage.of(one.partition or 0, record)


def _check(limit: int) -> None:
    if not 1 <= limit <= PAGE_LIMIT:
        raise InvalidInput(f"{limit} messages are no page: 1 to {PAGE_LIMIT}")
