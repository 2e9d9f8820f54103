"""Fetch classes' parts of their rates from the buckets of a node's partitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from mqlayer.consuming.engine.class_limits import ClassLimits
from mqlayer.consuming.engine.clock import clock
from mqlayer.redis.keys import class_rate_key
from mqlayer.redis.node_connection import Command, NodeConnection
from mqlayer.redis.partition_scripts import LockHolder
from mqlayer.redis.rate_script import bucket_command, rate_reply
from mqlayer.redis.shared_scripts import SharedGroupPartition

EVERY_S: Final = 0.1
COMMANDS: Final = 1_000
"""Buckets asked at once."""


class RatedClasses(Protocol):
    """The classes of one member."""

    @property
    def limits(self) -> ClassLimits:
        """The limits of each class."""

    def wanted(self, most: int) -> dict[bytes, float]:
        """Return the permits to ask for, by class."""

    def grant(self, permits: Mapping[bytes, float]) -> None:
        """Add permits, and wake workers."""


class ClassRatePoller:
    """Asks in one call for all classes that wait."""

    def __init__(self, connection: NodeConnection, classes: RatedClasses) -> None:
        self._connection, self._classes = connection, classes
        self._ask_at = 0.0

    def poll(self, holders_now: Iterable[LockHolder | SharedGroupPartition]) -> None:
        """Ask the partitions' buckets, when that is due."""
        limits, now = self._classes.limits, clock()
        if limits.rate is None or now < self._ask_at:
            return
        holders = list(holders_now)
        self._ask_at = now + EVERY_S
        wanted = self._classes.wanted(max(1, COMMANDS // max(1, len(holders))))
        names = [name for name in wanted for _ in holders]
        commands: list[Command] = []
        for name, lacking in wanted.items():
            for holder in holders:
                key = class_rate_key(holder.prefix, holder.partition, holder.group_id, name)
                share = lacking / limits.partitions
                commands.append(bucket_command(self._connection, key, limits.rate.share, wanted=share))
        if commands:
            self._grant(names, self._connection.call(commands))

    def _grant(self, names: Sequence[bytes], replies: Sequence[Any]) -> None:
        granted = dict.fromkeys(names, 0.0)
        for name, reply in zip(names, replies, strict=True):
            granted[name] += rate_reply(reply, self._connection.node.address).granted
        self._classes.grant(granted)
