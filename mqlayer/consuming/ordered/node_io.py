"""What a member has to each node: two connections with a thread each, one that reads and one that settles."""

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
    """What both threads ask of their member."""


class NodeIo:
    """The threads of one node. `repairing` is held by the one that sees to a node that restarted."""

    def __init__(self, owner: NodeIoOwner, node: Node, connect: Callable[[Node], NodeConnection], *, name: str) -> None:
        self.repairing = threading.Lock()
        self._connections = (connect(node), connect(node))
        self.reader = Reader(owner, self._connections[0], name=f"{name}-{node.name}")
        self.settler = Settler(owner, self._connections[1], name=f"{name}-{node.name}")

    def start(self) -> None:
        """Start the threads."""
        self.reader.start()
        self.settler.start()

    def set_node(self, node: Node) -> None:
        """Let the connections go to the run and address that count now; a connection to another one is not used any
        more."""
        for connection in self._connections:
            if connection.node != node:
                connection.node = node

    def health(self, limit_s: float) -> Health:
        """Say how both threads are. Arming a node again may take its time, so nobody is stuck meanwhile."""
        found = Health.of_all(self.reader.health(limit_s), self.settler.health(limit_s))
        return Health(waits=found.waits) if self.repairing.locked() else found


class MemberNodes:
    """The links of a member, opened by one thread at first need and looked at by all."""

    def __init__(self) -> None:
        # Replaced as a whole by the one thread that adds: others may look through it at any time.
        self._by_node: dict[NodeId, NodeIo] = {}

    def get(self, node_id: NodeId) -> NodeIo | None:
        """Return the link to a node."""
        return self._by_node.get(node_id)

    def add(self, node_id: NodeId, node_io: NodeIo) -> None:
        """Add and start a link."""
        self._by_node = {**self._by_node, node_id: node_io}
        node_io.start()

    def set_nodes(self, nodes: Mapping[NodeId, Node]) -> None:
        """Let all connections go to the runs and addresses that count now."""
        for node_id, node_io in self._by_node.items():
            if node_id in nodes:
                node_io.set_node(nodes[node_id])

    def wake_settlers(self) -> None:
        """Let the settlers send what was noted."""
        for node_io in self._by_node.values():
            if not node_io.settler.wake.is_set():
                node_io.settler.wake.set()

    def health(self, limit_s: float) -> Health:
        """Say how all threads are."""
        return Health.of_all(*(node_io.health(limit_s) for node_io in self._by_node.values()))

    def stop(self, timeout_s: float) -> None:
        """Send what is handled, and end all threads."""
        nodes = self._by_node.values()
        end_all([thread for node_io in nodes for thread in (node_io.reader, node_io.settler)], timeout_s)
