"""What a member of a shared group has to each node: two connections with a thread each; and how a node is repaired."""

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
from mqlayer.settings import Settings
from mqlayer.topics.nodes import arm_if_allowed

log = logging.getLogger(__name__)


class SharedNodeIoOwner(SharedReaderOwner, SharedSettlerOwner, Protocol):
    """What both threads ask of their member, and what makes its connections."""

    settings: Settings
    group: Group


class SharedNodeIo:
    """The threads of one node. `repairing` is held by the one that sees to a node that restarted."""

    def __init__(
        self, owner: SharedNodeIoOwner, connections: tuple[NodeConnection, NodeConnection], *, name: str
    ) -> None:
        self.repairing = threading.Lock()
        self.connections = connections
        self.reader = SharedReader(owner, connections[0], group_id=owner.group.group_id, name=name)
        self.settler = SharedSettler(owner, connections[1], name=name)

    def health(self, limit_s: float) -> Health:
        """Say how both threads are. Arming a node again may take its time, so nobody is stuck meanwhile."""
        found = Health.of_all(self.reader.health(limit_s), self.settler.health(limit_s))
        return Health(waits=found.waits) if self.repairing.locked() else found


class SharedMemberNodes:
    """The links of a member, opened by its heartbeat at first need and looked at by all."""

    def __init__(
        self, owner: SharedNodeIoOwner, routes: RouteCache, database: Database, application: Database | None
    ) -> None:
        self._owner, self._routes, self._database, self._application = owner, routes, database, application
        # Replaced as a whole by the one thread that adds: others may look through it at any time.
        self._by_node: dict[NodeId, SharedNodeIo] = {}

    def open(self, node_id: NodeId) -> None:
        """Open the link to a node, unless it is. Raises StoreUnavailable, NotFound for one that was removed."""
        if node_id in self._by_node:
            return
        node = self._node(node_id)
        name = f"mqlayer-{self._owner.group.name}-{node.name}"
        node_io = SharedNodeIo(self._owner, (self._connect(node), self._connect(node)), name=name)
        self._by_node = {**self._by_node, node_id: node_io}
        node_io.reader.start()
        node_io.settler.start()

    def settler(self, node_id: NodeId) -> SharedSettler | None:
        """Return the settling thread of a node."""
        node_io = self._by_node.get(node_id)
        return None if node_io is None else node_io.settler

    def unsettled(self, batch: FetchedBatch) -> set[int]:
        """Return which messages of a batch wait to be settled or given back."""
        settler = self.settler(batch.assignment.node)
        if settler is None:
            return set()
        ended = {offset for one in list(settler.settlements) if one.batch is batch for offset in one.offsets}
        return ended | {one.offset for one in list(settler.nacks) if one.batch is batch}

    def wake_readers(self) -> None:
        """Have readers look whether there is room."""
        for node_io in self._by_node.values():
            if not node_io.reader.wake.is_set():
                node_io.reader.wake.set()

    def refresh_nodes(self) -> None:
        """Ask which runs and addresses of nodes count now: connections to others are not used any more."""
        nodes = self._routes.refresh_nodes()
        for node_id, node_io in list(self._by_node.items()):
            for connection in node_io.connections:
                if node_id in nodes and connection.node != nodes[node_id]:
                    connection.node = nodes[node_id]

    def repair(self, node_id: NodeId) -> None:
        """Arm a node again, unless somebody did. Raises nothing."""
        node_io = self._by_node.get(node_id)
        if node_io is None or not node_io.repairing.acquire(blocking=False):
            return
        try:
            armed = arm_if_allowed(
                self._database,
                self._node(node_id).name,
                prefix=self._owner.settings.key_prefix,
                application=self._application,
                actor=self._owner.member_id,
                unsafe=self._owner.settings.allow_unsafe_redis,
            )
            self._routes.refresh_nodes()
            for connection in node_io.connections:
                connection.node = armed
        except MqlayerError as error:
            log.warning("node_not_armed", extra={"node_id": node_id, "reason": str(error)})
        finally:
            node_io.repairing.release()

    def health(self, limit_s: float) -> Health:
        """Say how all threads are."""
        return Health.of_all(*(node_io.health(limit_s) for node_io in self._by_node.values()))

    def stop_readers(self, timeout_s: float) -> None:
        """End what reads."""
        end_all([node_io.reader for node_io in self._by_node.values()], timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Send what there is to say, and end."""
        end_all([node_io.settler for node_io in self._by_node.values()], timeout_s)

    def _node(self, node_id: NodeId) -> Node:
        try:
            return self._routes.node(node_id)
        except KeyError:
            raise NotFound("node", node_id, "it was removed while its partitions are in use") from None

    def _connect(self, node: Node) -> NodeConnection:
        settings = self._owner.settings
        return connection_of(node, settings, RedisRole.CONSUMER)
