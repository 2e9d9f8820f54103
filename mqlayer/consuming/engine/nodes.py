"""A member's connections to nodes: a reader and a settler each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.node_service import NodeService
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, NotFound
from mqlayer.health import Health
from mqlayer.logs import event_logger
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.service import stop_all
from mqlayer.topics.nodes import arm_if_allowed

log = event_logger(__name__)

R = TypeVar("R", bound=NodeService)
S = TypeVar("S", bound=NodeService)


class NodeIo(Generic[R, S]):
    """One node's reader and settler. Arming holds `repairing`."""

    def __init__(self, reading: NodeConnection, settling: NodeConnection, reader: R, settler: S) -> None:
        self.repairing = threading.Lock()
        self._connections = (reading, settling)
        self.reader, self.settler = reader, settler

    def start(self) -> None:
        """Start both threads."""
        self.reader.start()
        self.settler.start()

    @property
    def node(self) -> Node:
        """Run and address in use."""
        return self._connections[0].node

    def set_node(self, node: Node) -> None:
        """Use only this run and address."""
        for connection in self._connections:
            if connection.node != node:
                connection.node = node

    def health(self, limit_s: float) -> Health:
        """Report both threads; while arming, none is stuck."""
        found = Health.of_all(self.reader.health(limit_s), self.settler.health(limit_s))
        return Health(waits=found.waits) if self.repairing.locked() else found


class MemberNodes(Generic[R, S]):
    """A member's nodes, opened at first need by one thread.

    `reader` and `settler` make a node's threads, from a connection and a name's first part.
    """

    def __init__(
        self,
        core: MemberCore,
        *,
        reader: Callable[[NodeConnection, str], R],
        settler: Callable[[NodeConnection, str], S],
    ) -> None:
        self._core, self._reader, self._settler = core, reader, settler
        # The opening thread replaces it as a whole, so others may iterate over it.
        self._by_node: dict[NodeId, NodeIo[R, S]] = {}

    def open(self, node_id: NodeId) -> NodeIo[R, S]:
        """Connect once. Raises StoreUnavailable, NotFound."""
        known = self._by_node.get(node_id)
        if known is not None:
            return known
        node = self._node(node_id)
        name, reading, settling = f"{self._core.name}-{node.name}", self._connect(node), self._connect(node)
        node_io = NodeIo(reading, settling, self._reader(reading, name), self._settler(settling, name))
        self._by_node = {**self._by_node, node_id: node_io}
        node_io.start()
        return node_io

    def settler(self, node_id: NodeId) -> S | None:
        """Return a node's settler."""
        node_io = self._by_node.get(node_id)
        return None if node_io is None else node_io.settler

    def wake_reader(self, node_id: NodeId) -> None:
        """Wake a node's reader."""
        node_io = self._by_node.get(node_id)
        if node_io is not None and not node_io.reader.wake.is_set():
            node_io.reader.wake.set()

    def wake_readers(self) -> None:
        """Wake all readers."""
        for node_io in self._by_node.values():
            if not node_io.reader.wake.is_set():
                node_io.reader.wake.set()

    def wake_settler(self, node_id: NodeId) -> bool:
        """Wake a node's settler; False without one."""
        node_io = self._by_node.get(node_id)
        if node_io is not None:
            node_io.settler.wake.set()
        return node_io is not None

    def wake_settlers(self) -> None:
        """Wake all settlers."""
        for node_io in self._by_node.values():
            if not node_io.settler.wake.is_set():
                node_io.settler.wake.set()

    def refresh(self, state: str) -> None:
        """Follow changed nodes. Raises StoreUnavailable."""
        nodes = self._core.routes.follow_nodes(state)
        for node_id, node_io in self._by_node.items():
            if node_id in nodes:
                node_io.set_node(nodes[node_id])

    def repair(self, node_id: NodeId) -> None:
        """Arm a node unless that is under way. Raises nothing."""
        node_io = self._by_node.get(node_id)
        if node_io is None or not node_io.repairing.acquire(blocking=False):
            return
        try:
            with self._core.routes.arming(node_id):
                armed = self._node(node_id)
                # Another member of this process may have armed it meanwhile.
                if armed == node_io.node:
                    armed = self._arm(node_id)
                    self._core.routes.refresh_nodes()
            node_io.set_node(armed)
        except MqlayerError as error:
            log.warning("node_not_armed", extra={"node_id": node_id, "reason": str(error)})
        finally:
            node_io.repairing.release()
            self._core.beat.set()

    def health(self, limit_s: float) -> Health:
        """Report all threads' health."""
        return Health.of_all(*(node_io.health(limit_s) for node_io in self._by_node.values()))

    def stop_readers(self, timeout_s: float) -> None:
        """End the readers."""
        stop_all([node_io.reader for node_io in self._by_node.values()], timeout_s)

    def stop_settlers(self, timeout_s: float) -> None:
        """Send results and end the settlers."""
        stop_all([node_io.settler for node_io in self._by_node.values()], timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Send results and end all threads."""
        nodes = self._by_node.values()
        stop_all([thread for node_io in nodes for thread in (node_io.reader, node_io.settler)], timeout_s)

    def _arm(self, node_id: NodeId) -> Node:
        return arm_if_allowed(self._core.runtime, self._node(node_id).name)

    def _node(self, node_id: NodeId) -> Node:
        try:
            return self._core.routes.node(node_id)
        except KeyError:
            raise NotFound("node", node_id, "it was removed while its partitions are in use") from None

    def _connect(self, node: Node) -> NodeConnection:
        return self._core.runtime.connection(node, RedisRole.CONSUMER)
