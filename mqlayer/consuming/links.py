"""What a member has to each node: two connections with a thread each, one that reads and one that settles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from mqlayer.consuming.node_thread import end_all
from mqlayer.consuming.reading import Reader, ReadingOwner
from mqlayer.consuming.settling import Settler, SettlingOwner
from mqlayer.domain.routing import NodeId
from mqlayer.health import Health
from mqlayer.redis.nodes import Node, NodeConnection


class LinkOwner(ReadingOwner, SettlingOwner, Protocol):
    """What both threads ask of their member."""


class Link:
    """The threads of one node. `repairing` is held by the one that sees to a node that restarted."""

    def __init__(self, owner: LinkOwner, node: Node, connect: Callable[[Node], NodeConnection], *, name: str) -> None:
        self.repairing = threading.Lock()
        self._lines = (connect(node), connect(node))
        self.reader = Reader(owner, self._lines[0], name=f"{name}-{node.name}")
        self.settler = Settler(owner, self._lines[1], name=f"{name}-{node.name}")

    def start(self) -> None:
        """Start the threads."""
        self.reader.start()
        self.settler.start()

    def expect(self, node: Node) -> None:
        """Let the connections go to the run and address that count now; a line to another one is not used any more."""
        for line in self._lines:
            if line.node != node:
                line.node = node

    def health(self, limit_s: float) -> Health:
        """Say how both threads are. Arming a node again may take its time, so nobody is stuck meanwhile."""
        found = Health.of_all(self.reader.health(limit_s), self.settler.health(limit_s))
        return Health(waits=found.waits) if self.repairing.locked() else found


class Links:
    """The links of a member, opened by one thread at first need and looked at by all."""

    def __init__(self) -> None:
        # Replaced as a whole by the one thread that adds: others may look through it at any time.
        self._by_node: dict[NodeId, Link] = {}

    def get(self, node_id: NodeId) -> Link | None:
        """Return the link to a node."""
        return self._by_node.get(node_id)

    def add(self, node_id: NodeId, link: Link) -> None:
        """Add and start a link."""
        self._by_node = {**self._by_node, node_id: link}
        link.start()

    def expect(self, nodes: Mapping[NodeId, Node]) -> None:
        """Let all connections go to the runs and addresses that count now."""
        for node_id, link in self._by_node.items():
            if node_id in nodes:
                link.expect(nodes[node_id])

    def send_some(self) -> None:
        """Let the settlers send what was noted."""
        for link in self._by_node.values():
            if not link.settler.wake.is_set():
                link.settler.wake.set()

    def health(self, limit_s: float) -> Health:
        """Say how all threads are."""
        return Health.of_all(*(link.health(limit_s) for link in self._by_node.values()))

    def stop(self, timeout_s: float) -> None:
        """Send what is handled, and end all threads."""
        links = self._by_node.values()
        end_all([thread for link in links for thread in (link.reader, link.settler)], timeout_s)
