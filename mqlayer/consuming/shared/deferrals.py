"""Messages that wait on one node for their class's turn: docs/design/key-class-limits.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from mqlayer.consuming.engine.rate_limiter import RateLimiter
from mqlayer.consuming.shared.partitions import SharedPartition
from mqlayer.consuming.shared.shared_classes import SharedClasses
from mqlayer.domain.message import Record
from mqlayer.failpoints import failpoint
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import Fenced
from mqlayer.redis.shared_scripts import (
    AT_ONCE,
    DueMessages,
    SharedGroupPartition,
    shared_count_reply,
    shared_defer_command,
    shared_deferred_command,
    shared_deferred_reply,
)

SCAN_BYTES: Final = 4 * 1024 * 1024
"""Bound of a read past a flood, by the size of recent records."""
DEFERRED_LIMIT: Final = 100_000
"""Deferred messages of a partition, about: the bound of reading past a flood."""


class Deferrals:
    """Defers what finds no room in one member, and takes what finds some. One reader's thread."""

    def __init__(
        self,
        connection: NodeConnection,
        member_id: str,
        classes: SharedClasses,
        rate_limiter: RateLimiter,
        void: Callable[[SharedGroupPartition], None],
    ) -> None:
        self._connection, self._member_id = connection, member_id
        self._classes, self._rate_limiter, self._void = classes, rate_limiter, void
        self._record_bytes = 1.0
        self._waiting: list[tuple[SharedGroupPartition, Sequence[tuple[int, bytes]]]] = []
        self._at = 0

    @property
    def active(self) -> bool:
        """Whether messages are deferred. With a rate, members read only what may begin soon."""
        return self._classes.active and self._rate_limiter.limit is None

    def scan(self, partitions: Sequence[SharedPartition], most: int) -> tuple[list[SharedPartition], int]:
        """Return the partitions to read past floods, and how many records of each."""
        found = [one for one in partitions if one.deferred < DEFERRED_LIMIT] if self.active else []
        return found, min(most, 1 + int(SCAN_BYTES / self._record_bytes / max(1, len(found))))

    def note_size(self, records: Sequence[Record]) -> None:
        """Update the mean size of records."""
        size = sum([len(one.body) for one in records]) / len(records)
        self._record_bytes = max(1.0, 0.8 * self._record_bytes + 0.2 * size)

    def keep(self, partition: SharedPartition, records: Sequence[Record]) -> list[Record]:
        """Return the records that find room; `send` defers the others."""
        taken, deferred = self._classes.admit(records)
        for at in range(0, len(deferred), AT_ONCE):
            self._waiting.append((partition.group_partition, deferred[at : at + AT_ONCE]))
        return taken

    def send(self) -> None:
        """Give back what found no room."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        failpoint("shared.before_defer")
        commands = [
            shared_defer_command(self._connection, holder, self._member_id, messages) for holder, messages in waiting
        ]
        for (holder, _), reply in zip(waiting, self._connection.call(commands), strict=True):
            if isinstance(shared_count_reply(reply, self._connection.node.address), Fenced):
                self._void(holder)
        failpoint("shared.after_defer")

    def take(self, partitions: Sequence[SharedPartition]) -> list[tuple[SharedPartition, DueMessages]]:
        """Take deferred messages that find room."""
        room = self._classes.deferred_room(self._record_bytes)
        most = self._rate_limiter.available(room.most)
        holding = [partition for partition in partitions if partition.deferred]
        if most <= 0 or not holding:
            return []
        if most < len(holding):
            self._at += most
            at = self._at % len(holding)
            holding = (holding[at:] + holding[:at])[:most]
        # Each partition may give its part of a class's room; what exceeds it by rounding is small.
        parts = len(holding)
        named = [(name, -(-count // parts)) for name, count in room.named]
        commands = [
            shared_deferred_command(
                self._connection,
                partition.group_partition,
                self._member_id,
                most // parts,
                each=-(-room.each // parts),
                after=partition.deferred_after,
                named=named,
            )
            for partition in holding
        ]
        replies = self._connection.call(commands)
        failpoint("shared.after_deferred")
        found: list[tuple[SharedPartition, DueMessages]] = []
        for partition, reply in zip(holding, replies, strict=True):
            answer = shared_deferred_reply(reply, self._connection.node.address)
            if not isinstance(answer, Fenced):
                partition.took_deferred(answer.after, answer.left)
                found.append((partition, answer.due))
        return found
