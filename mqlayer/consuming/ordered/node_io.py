"""A member's connections to nodes: a reader and a settler each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from mqlayer.consuming.engine.node_thread import end_all
from mqlayer.consuming.ordered.reader import Reader, ReaderOwner
from mqlayer.consuming.ordered.settler import Settler, SettlerOwner
from mqlayer.domain.routing import NodeId
from mqlayer.health import Health
from mqlayer.redis.node_connection import Node, NodeConnection


class NodeIoOwner(ReaderOwner, SettlerOwner, Protocol):
    """The member, as both threads use it."""


class NodeIo:
    """One node's reader and settler. Arming holds `repairing`."""

    def __init__(self, owner: NodeIoOwner, node: Node, connect: Callable[[Node], NodeConnection], *, name: str) -> None:
        self.repairing = threading.Lock()
        self._connections = (connect(node), connect(node))
        self.reader = Reader(owner, self._connections[0], name=f"{name}-{node.name}")
        self.settler = Settler(owner, self._connections[1], name=f"{name}-{node.name}")

    def start(self) -> None:
        """Start both threads."""
        self.reader.start()
        self.settler.start()

    def set_node(self, node: Node) -> None:
        """Use only this run and address."""
        for connection in self._connections:
            if connection.node != node:
                connection.node = node

    def health(self, limit_s: float) -> Health:
        """Report both threads; while arming, none is stuck."""
        found = Health.of_all(self.reader.health(limit_s), self.settler.health(limit_s))
        return Health(waits=found.waits) if self.repairing.locked() else found


class MemberNodes:
    """A member's nodes; one thread adds."""

    def __init__(self) -> None:
        # The adding thread replaces it as a whole, so others may iterate over it.
        self._by_node: dict[NodeId, NodeIo] = {}

    def get(self, node_id: NodeId) -> NodeIo | None:
        """Return a node's threads, or None."""
        return self._by_node.get(node_id)

    def add(self, node_id: NodeId, node_io: NodeIo) -> None:
        """Add and start a node's threads."""
        self._by_node = {**self._by_node, node_id: node_io}
        node_io.start()

    def set_nodes(self, nodes: Mapping[NodeId, Node]) -> None:
        """Follow changed nodes."""
        for node_id, node_io in self._by_node.items():
            if node_id in nodes:
                node_io.set_node(nodes[node_id])

    def wake_settlers(self) -> None:
        """Wake all settlers."""
        for node_io in self._by_node.values():
            if not node_io.settler.wake.is_set():
                node_io.settler.wake.set()

    def health(self, limit_s: float) -> Health:
        """Report all threads' health."""
        return Health.of_all(*(node_io.health(limit_s) for node_io in self._by_node.values()))

    def stop(self, timeout_s: float) -> None:
        """Send results and end threads."""
        nodes = self._by_node.values()
        end_all([thread for node_io in nodes for thread in (node_io.reader, node_io.settler)], timeout_s)
