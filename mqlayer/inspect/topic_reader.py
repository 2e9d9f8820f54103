"""Read a topic's messages without a group: nothing is settled, and no consumer notices.

Messages of a key come in order, over splits, merges and moves: a partition is read after the end of those that it took
LPs from. Trimmed messages are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self

from mqlayer.domain.large_bodies import BodyReference
from mqlayer.domain.message import NO_KEY, Identity, Record, pop_command, records_of
from mqlayer.domain.names import check_name, encode_key
from mqlayer.domain.routing import lp_of
from mqlayer.errors import NotFound
from mqlayer.groups.start_positions import (
    Start,
    StartFinder,
    UndeletedPartition,
    parents_of,
    undeleted_partitions,
)
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import raise_for_reply
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime

PAGE_BYTES: Final = 8_000_000
PAGE_RECORDS: Final = 500
"""Bounds of one reply, even with the largest bodies."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message in a partition. `published_at`: by the publisher's clock; `reordered`: its key's order may not hold."""

    partition: int
    offset: int
    identity: Identity
    key: str | None
    tags: tuple[str, ...]
    headers: Mapping[str, str]
    published_at: datetime
    body: bytes
    reordered: bool
    large_body: BodyReference | None = None

    @classmethod
    def of(cls, partition: int, record: Record) -> Self:
        """Return a record's message."""
        at = datetime.fromtimestamp(record.at_ms / 1000, UTC)
        key = None if record.key == NO_KEY else record.key.decode(errors="replace")
        return cls(partition, record.offset, record.identity, key, record.tags, record.headers, at, record.body,
                   record.reordered, record.large_body)  # fmt: skip


class TopicReader:
    """Reads on from a start, page by page. For one thread; close it."""

    def __init__(
        self,
        runtime: Runtime,
        topic: str,
        *,
        start: Start = "earliest",
        key: str | None = None,
        partition: int | None = None,
    ) -> None:
        """`key`, `partition`: only their messages. Raises NotFound, KeyTooLarge, StoreUnavailable."""
        check_name("topic", topic)
        self._runtime, self._routes = runtime, RouteCache(runtime.control)
        self._key, self._partition = None if key is None else encode_key(key), partition
        self._route = self._routes.route(topic)
        self._page = max(1, min(PAGE_RECORDS, PAGE_BYTES // self._route.body_limit))
        self._pool = NodePool(runtime, self._routes.node, RedisRole.VIEWER)
        self._partitions = self._wanted()
        if not self._partitions:
            known = f"see those that there are: mqlayer topic list {topic}"
            raise NotFound("partition", partition, known)
        found = StartFinder(runtime, self._routes, self._partitions).of(start)
        self._offsets = {one.partition: one.offset for one in found}
        self._ended = {one.partition for one in found if one.drained}
        self.at_end, self.scanned = False, 0
        """Whether the last `read` found all that there was; records read in all."""

    def move_to(self, offset: int) -> None:
        """Read from an offset on, in each partition."""
        self._offsets = dict.fromkeys(self._offsets, max(1, offset))
        self._ended = set()

    def move_to_last(self, count: int) -> None:
        """Read so many last messages of each partition."""
        found = StartFinder(self._runtime, self._routes, self._partitions).ends()
        self._offsets = {name: max(1, end - count) for name, end in found.items()}
        self._ended = set()

    def read(self) -> Iterator[StoredMessage]:
        """Yield a page of each partition whose predecessors were read to their end."""
        self.at_end = True
        for partition in self._partitions:
            if partition.partition not in self._ended and self._is_next(partition):
                yield from self._read(partition)

    def refresh(self) -> None:
        """Take in the partitions that route changes made and deleted meanwhile."""
        self._partitions = self._wanted()
        for one in self._partitions:
            self._offsets.setdefault(one.partition, 1)

    def close(self) -> None:
        """Close its connections."""
        self._pool.close()
        self._routes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wanted(self) -> list[UndeletedPartition]:
        with self._runtime.control.connection() as connection:
            found = undeleted_partitions(connection, self._route.topic_id)
        lp = None if self._key is None else lp_of(self._key)
        return [
            one
            for one in found
            if self._partition in (None, one.partition) and (lp is None or one.lp_from <= lp < one.lp_to)
        ]

    def _is_next(self, partition: UndeletedPartition) -> bool:
        return all(parent.partition in self._ended for parent in parents_of(partition, self._partitions))

    def _read(self, partition: UndeletedPartition) -> Iterator[StoredMessage]:
        name = partition.partition
        connection = self._pool.to(partition.node)
        # The command record of a sealed partition has the last message's offset, and another number behind it.
        since = b"%d-1" % (self._offsets[name] - 1)
        log = partition_keys(self._runtime.prefix, name).log
        (reply,) = connection.call([("XRANGE", log, since, "+", "COUNT", self._page)])
        entries = raise_for_reply(reply, connection.node.address)
        full, sealed = len(entries) == self._page, pop_command(entries) is not None
        # Behind a sealed partition, its successors follow.
        self.at_end = self.at_end and not full and not sealed
        self.scanned += len(entries)
        for record in records_of(entries):
            self._offsets[name] = record.offset + 1
            if not record.void and self._key in (None, record.key):
                yield StoredMessage.of(name, record)
        if sealed:
            self._ended.add(name)
