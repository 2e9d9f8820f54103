"""A shared member's connections to nodes, and the repair of nodes."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from mqlayer.consuming.engine.node_thread import end_all
from mqlayer.consuming.shared.prefetch import FetchedBatch
from mqlayer.consuming.shared.reader import SharedReader, SharedReaderOwner
from mqlayer.consuming.shared.settler import SharedSettler, SharedSettlerOwner
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, NotFound
from mqlayer.groups.group import Group
from mqlayer.health import Health
from mqlayer.postgres.database import Database
from mqlayer.redis.node_connection import Node, NodeConnection, connection_of
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings
from mqlayer.topics.nodes import arm_if_allowed

log = logging.getLogger(__name__)


class SharedNodeIoOwner(SharedReaderOwner, SharedSettlerOwner, Protocol):
    """The member, as both threads use it."""

    settings: Settings
    group: Group


class SharedNodeIo:
    """One node's reader and settler. Arming holds `repairing`."""

    def __init__(
        self, owner: SharedNodeIoOwner, connections: tuple[NodeConnection, NodeConnection], *, name: str
    ) -> None:
        self.repairing = threading.Lock()
        self.connections = connections
        self.reader = SharedReader(owner, connections[0], group_id=owner.group.group_id, name=name)
        self.settler = SharedSettler(owner, connections[1], name=name)

    def health(self, limit_s: float) -> Health:
        """Report both threads; while arming, none is stuck."""
        found = Health.of_all(self.reader.health(limit_s), self.settler.health(limit_s))
        return Health(waits=found.waits) if self.repairing.locked() else found


class SharedMemberNodes:
    """A member's nodes, opened at first need."""

    def __init__(
        self, owner: SharedNodeIoOwner, routes: RouteCache, database: Database, application: Database | None
    ) -> None:
        self._owner, self._routes, self._database, self._application = owner, routes, database, application
        # One thread replaces it as a whole, so others may iterate over it.
        self._by_node: dict[NodeId, SharedNodeIo] = {}

    def open(self, node_id: NodeId) -> None:
        """Connect once. Raises StoreUnavailable, NotFound."""
        if node_id in self._by_node:
            return
        node = self._node(node_id)
        name = f"mqlayer-{self._owner.group.name}-{node.name}"
        node_io = SharedNodeIo(self._owner, (self._connect(node), self._connect(node)), name=name)
        self._by_node = {**self._by_node, node_id: node_io}
        node_io.reader.start()
        node_io.settler.start()

    def settler(self, node_id: NodeId) -> SharedSettler | None:
        """Return a node's settler."""
        node_io = self._by_node.get(node_id)
        return None if node_io is None else node_io.settler

    def unsettled(self, batch: FetchedBatch) -> set[int]:
        """Return a batch's unsent offsets."""
        settler = self.settler(batch.assignment.node)
        if settler is None:
            return set()
        ended = {offset for one in list(settler.settlements) if one.batch is batch for offset in one.offsets}
        return ended | {one.offset for one in list(settler.nacks) if one.batch is batch}

    def wake_readers(self) -> None:
        """Wake the readers."""
        for node_io in self._by_node.values():
            if not node_io.reader.wake.is_set():
                node_io.reader.wake.set()

    def refresh_nodes(self) -> None:
        """Follow changed nodes. Raises StoreUnavailable."""
        nodes = self._routes.refresh_nodes()
        for node_id, node_io in list(self._by_node.items()):
            for connection in node_io.connections:
                if node_id in nodes and connection.node != nodes[node_id]:
                    connection.node = nodes[node_id]

    def repair(self, node_id: NodeId) -> None:
        """Arm a node unless that is done. Raises nothing."""
        node_io = self._by_node.get(node_id)
        if node_io is None or not node_io.repairing.acquire(blocking=False):
            return
        try:
            runtime = Runtime(self._database, self._owner.settings, self._application, self._owner.member_id)
            armed = arm_if_allowed(runtime, self._node(node_id).name)
            self._routes.refresh_nodes()
            for connection in node_io.connections:
                connection.node = armed
        except MqlayerError as error:
            log.warning("node_not_armed", extra={"node_id": node_id, "reason": str(error)})
        finally:
            node_io.repairing.release()

    def health(self, limit_s: float) -> Health:
        """Report all threads' health."""
        return Health.of_all(*(node_io.health(limit_s) for node_io in self._by_node.values()))

    def stop_readers(self, timeout_s: float) -> None:
        """End the readers."""
        end_all([node_io.reader for node_io in self._by_node.values()], timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Send results and end settlers."""
        end_all([node_io.settler for node_io in self._by_node.values()], timeout_s)

    def _node(self, node_id: NodeId) -> Node:
        try:
            return self._routes.node(node_id)
        except KeyError:
            raise NotFound("node", node_id, "it was removed while its partitions are in use") from None

    def _connect(self, node: Node) -> NodeConnection:
        settings = self._owner.settings
        return connection_of(node, settings, RedisRole.CONSUMER)
