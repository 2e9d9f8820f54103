"""What a member of a shared group has to each node: two connections with a thread each; and how a node is mended."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from mqlayer.consuming.node_thread import end_all
from mqlayer.consuming.sharing.pool import Batch
from mqlayer.consuming.sharing.reading import SharedReader, SharedReadingOwner
from mqlayer.consuming.sharing.settling import SharedSettler, SharedSettlingOwner
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, NotFound
from mqlayer.health import Health
from mqlayer.membership.groups import Group
from mqlayer.postgres.database import Database
from mqlayer.redis.nodes import Node, NodeConnection, connection_of
from mqlayer.redis.roles import RedisRole
from mqlayer.routes.cache import RouteCache
from mqlayer.settings import Settings
from mqlayer.topics.nodes import arm_if_allowed

log = logging.getLogger(__name__)


class SharedLinkOwner(SharedReadingOwner, SharedSettlingOwner, Protocol):
    """What both threads ask of their member, and what makes its connections."""

    settings: Settings
    group: Group


class _Link:
    """The threads of one node. `repairing` is held by the one that sees to a node that restarted."""

    def __init__(self, owner: SharedLinkOwner, lines: tuple[NodeConnection, NodeConnection], *, name: str) -> None:
        self.repairing = threading.Lock()
        self.lines = lines
        self.reader = SharedReader(owner, lines[0], group_id=owner.group.group_id, name=name)
        self.settler = SharedSettler(owner, lines[1], name=name)

    def health(self, limit_s: float) -> Health:
        """Say how both threads are. Arming a node again may take its time, so nobody is stuck meanwhile."""
        found = Health.of_all(self.reader.health(limit_s), self.settler.health(limit_s))
        return Health(waits=found.waits) if self.repairing.locked() else found


class SharedLinks:
    """The links of a member, opened by its heart at first need and looked at by all."""

    def __init__(
        self, owner: SharedLinkOwner, routes: RouteCache, database: Database, application: Database | None
    ) -> None:
        self._owner, self._routes, self._database, self._application = owner, routes, database, application
        # Replaced as a whole by the one thread that adds: others may look through it at any time.
        self._by_node: dict[NodeId, _Link] = {}

    def open(self, node_id: NodeId) -> None:
        """Open the link to a node, unless it is. Raises StoreUnavailable, NotFound for one that was removed."""
        if node_id in self._by_node:
            return
        node = self._node(node_id)
        name = f"mqlayer-{self._owner.group.name}-{node.name}"
        link = _Link(self._owner, (self._connect(node), self._connect(node)), name=name)
        self._by_node = {**self._by_node, node_id: link}
        link.reader.start()
        link.settler.start()

    def settler(self, node_id: NodeId) -> SharedSettler | None:
        """Return the settling thread of a node."""
        link = self._by_node.get(node_id)
        return None if link is None else link.settler

    def to_be_settled(self, batch: Batch) -> set[int]:
        """Return which messages of a batch wait to be settled or given back."""
        settler = self.settler(batch.assigned.node)
        if settler is None:
            return set()
        ended = {offset for one in list(settler.ended) if one.batch is batch for offset in one.offsets}
        return ended | {one.offset for one in list(settler.back) if one.batch is batch}

    def wake_readers(self) -> None:
        """Have readers look whether there is room."""
        for link in self._by_node.values():
            if not link.reader.wake.is_set():
                link.reader.wake.set()

    def follow_nodes(self) -> None:
        """Ask which runs and addresses of nodes count now: lines to others are not used any more."""
        nodes = self._routes.refresh_nodes()
        for node_id, link in list(self._by_node.items()):
            for line in link.lines:
                if node_id in nodes and line.node != nodes[node_id]:
                    line.node = nodes[node_id]

    def mend(self, node_id: NodeId) -> None:
        """Arm a node again, unless somebody did. Raises nothing."""
        link = self._by_node.get(node_id)
        if link is None or not link.repairing.acquire(blocking=False):
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
            for line in link.lines:
                line.node = armed
        except MqlayerError as error:
            log.warning("node_not_armed", extra={"node_id": node_id, "reason": str(error)})
        finally:
            link.repairing.release()

    def health(self, limit_s: float) -> Health:
        """Say how all threads are."""
        return Health.of_all(*(link.health(limit_s) for link in self._by_node.values()))

    def stop_readers(self, timeout_s: float) -> None:
        """End what reads."""
        end_all([link.reader for link in self._by_node.values()], timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Send what there is to say, and end."""
        end_all([link.settler for link in self._by_node.values()], timeout_s)

    def _node(self, node_id: NodeId) -> Node:
        try:
            return self._routes.node(node_id)
        except KeyError:
            raise NotFound("node", node_id, "it was removed while its partitions are in use") from None

    def _connect(self, node: Node) -> NodeConnection:
        settings = self._owner.settings
        return connection_of(node, settings, RedisRole.CONSUMER)
