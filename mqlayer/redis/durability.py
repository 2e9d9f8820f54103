"""Waits for a durability class, behind writes of the same connection (docs/design/durability.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from mqlayer.domain.durability import DISK_WAIT_MS, WAIT_MS, Durability, replicas_wanted
from mqlayer.errors import ConfigurationRefused, StoreUnavailable
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.partition_scripts import touch_command
from mqlayer.redis.server_versions import WAITAOF_SINCE
from mqlayer.redis.wire import command_packet, wait_aof_packet, wait_packet


@dataclass(frozen=True, slots=True)
class DurabilityWait:
    """What follows an append: a touch, so that repetitions wait too, then one wait.

    `required`: replicas that a confirmed message has. `asked`: replicas to count, at least those.
    """

    disk: bool = False
    required: int = 0
    asked: int = 0
    wait_ms: int = WAIT_MS

    @classmethod
    def of(cls, durability: Durability, node: Node, *, asked: int = 0, wait_ms: int = WAIT_MS) -> DurabilityWait:
        """Return a class's wait on a node. `asked`: replicas that a producer counts besides."""
        required = replicas_wanted(durability, node.replicas)
        return cls(durability == "disk", required, max(required, asked), wait_ms)

    @property
    def replies(self) -> int:
        """How many replies it has; 0: nothing to wait for."""
        return self.disk + bool(self.asked) + (self.disk or bool(self.asked))

    def packets(self, connection: NodeConnection, prefix: str, partition: int) -> list[bytes]:
        """Return the requests that follow an append to a partition."""
        return self.shared_packets(connection, prefix, [partition])

    def shared_packets(self, connection: NodeConnection, prefix: str, partitions: Sequence[int]) -> list[bytes]:
        """Return touches of one server's partitions, then their wait."""
        if not self.replies:
            return []
        found = [command_packet(touch_command(connection, prefix, partition)) for partition in partitions]
        if self.disk:
            found.append(wait_aof_packet(DISK_WAIT_MS))
        if self.asked:
            found.append(wait_packet(self.asked, self.wait_ms))
        return found

    def shared_lacks(self, replies: Sequence[Any], partitions: Sequence[int]) -> dict[int, str]:
        """Return what partitions of `shared_packets` lack."""
        waits = replies[len(partitions) :]
        lacks = ((one, self.lack([touched, *waits])) for one, touched in zip(partitions, replies, strict=False))
        return {partition: lack for partition, lack in lacks if lack}

    def lack(self, replies: Sequence[Any]) -> str:
        """Return what a message lacks for its class, "" for nothing; replies as asked for by `packets`."""
        if not self.replies or not (self.disk or self.required):
            return ""
        # A touch that failed leaves the wait without a write to wait for.
        if isinstance(replies[0], Exception) or replies[0][0] != b"ok":
            return f"nothing could be written there to wait for: {replies[0]}"
        if self.disk and not (isinstance(replies[1], list) and replies[1] and replies[1][0] == 1):
            told = f": {replies[1]}" if isinstance(replies[1], Exception) else ""
            return f"stored, but not synced to disk within {DISK_WAIT_MS} ms{told}"
        if self.required:
            had = self.replicas(replies)
            if had < self.required:
                told = f": {replies[-1]}" if isinstance(replies[-1], Exception) else ""
                return f"stored, but {had} of {self.required} replicas have it after {self.wait_ms} ms{told}"
        return ""

    def replicas(self, replies: Sequence[Any]) -> int:
        """Return how many replicas have it."""
        return replies[-1] if self.asked and isinstance(replies[-1], int) else 0


NO_WAIT: Final = DurabilityWait()


def refuse_unheld(
    connection: NodeConnection, node: Node, prefix: str, partition: int, *, topic: str, durability: Durability
) -> None:
    """Wait once for a partition's class. Raises StoreUnavailable."""
    wait = DurabilityWait.of(durability, node)
    if not wait.replies:
        return
    connection.send_packet(*wait.packets(connection, prefix, partition))
    lack = wait.lack(connection.receive(wait.replies))
    if lack:
        # A new connection loads missing scripts.
        connection.close()
        raise StoreUnavailable(
            node.address,
            f"partition {partition} of topic {topic!r}, durability {durability}: {lack}; until it is held, nothing "
            f"changes, or lower the class: mqlayer topic set {topic} --durability node",
        )


def refuse_server(connection: NodeConnection, node: Node, durability: Durability) -> None:
    """Raise ConfigurationRefused for a server that can't hold a class."""
    if durability in ("replica", "quorum") and not node.replicas:
        raise ConfigurationRefused(
            node.address,
            "",
            f"node {node.name!r} has no replica, and durability {durability} waits for one",
            f"say how many it has: mqlayer node set {node.name} --replicas 1",
        )
    if durability != "disk":
        return
    facts = connection.connect()
    if facts.version < WAITAOF_SINCE:
        shown = ".".join(map(str, facts.version))
        raise ConfigurationRefused(
            node.address,
            "",
            f"this is Redis {shown}, which has no WAITAOF",
            "durability disk needs Redis 7.2 or later, or Valkey",
        )
    (reply,) = connection.call([("CONFIG", "GET", "appendfsync")])
    # Managed servers forbid CONFIG: each wait says whether the file is synced. A cluster answers for each shard.
    told = {value.decode() for value in reply[1::2]} if isinstance(reply, list) else set()
    if facts.early_waitaof and told != {"always"}:
        raise ConfigurationRefused(
            node.address,
            "appendfsync",
            ", ".join(sorted(told)) or "not told",
            "appendfsync always for durability disk: this server confirms a sync before it",
        )
    if "no" in told:
        raise ConfigurationRefused(node.address, "appendfsync", "no", "durability disk: appendfsync everysec or always")
