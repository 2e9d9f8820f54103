"""Cached routes and nodes, refreshed on refusal, by age and by notification.

The partition's append script decides (invariant 4 of ARCHITECTURE.md): an old route costs a refused call, never order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Final

from mqlayer.domain.names import check_name
from mqlayer.domain.routing import LpRange, NodeId, PartitionId, Route, RouteVersion
from mqlayer.errors import NotFound, StoreUnavailable
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.notifications import ROUTE, NotificationListener
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Node

MAX_AGE_S: Final = 30.0


def cluster_partitions(database: Database, node: Node) -> list[int]:
    """Return the partitions of a cluster that are not deleted; of another node, none."""
    if not node.is_cluster:
        return []
    with database.connection() as connection:
        rows = connection.execute(query("cluster_partitions"), {"node_id": node.node_id}).fetchall()
    return [row[0] for row in rows]


class RouteCache:
    """Routes and nodes; thread-safe, serves known ones while Postgres is unavailable."""

    def __init__(self, database: Database, *, max_age_s: float = MAX_AGE_S) -> None:
        self._database, self._max_age_s = database, max_age_s
        self._routes: dict[str, tuple[Route, float]] = {}
        self._nodes: dict[NodeId, Node] = {}
        self._armed_at: dict[NodeId, datetime | None] = {}
        # The reading of nodes that began last, that of the known ones, and the state that a heartbeat saw before it.
        self._reads, self._read, self._nodes_state = 0, 0, ""
        self._lock = threading.Lock()
        self._arming: dict[NodeId, threading.Lock] = {}
        self._notices: NotificationListener | None = None

    def route(self, topic: str) -> Route:
        """Return a route, at most `max_age_s` old while Postgres answers.

        Raises NotFound for an unknown topic, StoreUnavailable if nothing is cached.
        """
        known = self._routes.get(topic)
        if known is not None and time.monotonic() - known[1] < self._max_age_s:
            return known[0]
        try:
            return self.refresh(topic)
        except StoreUnavailable:
            if known is None:
                raise
            return known[0]

    def refresh(self, topic: str) -> Route:
        """Read a route from Postgres. Raises NotFound, StoreUnavailable."""
        check_name("topic", topic)
        try:
            route = load_route(self._database, topic)
        except NotFound:
            with self._lock:
                self._routes.pop(topic, None)
            raise
        with self._lock:
            known = self._routes.get(topic)
            # A slower reader must not restore an older version.
            if known is None or known[0].topic_id != route.topic_id or known[0].age <= route.age:
                self._routes[topic] = (route, time.monotonic())
            return self._routes[topic][0]

    def node(self, node_id: NodeId) -> Node:
        """Return a node as last read; KeyError if unregistered."""
        node = self._nodes.get(node_id)
        return node if node is not None else self.refresh_nodes()[node_id]

    def refresh_nodes(self, state: str = "") -> dict[NodeId, Node]:
        """Read all nodes from Postgres."""
        with self._lock:
            self._reads += 1
            number = self._reads
        with self._database.connection() as connection:
            known = {node.node_id: (node, armed_at) for node, armed_at in _read_nodes(connection)}
        nodes = {node_id: node for node_id, (node, _) in known.items()}
        with self._lock:
            # A slower reader must not restore what was before, least of all under a later state.
            if number > self._read:
                self._read, self._nodes, self._nodes_state = number, nodes, state
                self._armed_at = {node_id: armed_at for node_id, (_, armed_at) in known.items()}
        return nodes

    def follow_nodes(self, state: str) -> dict[NodeId, Node]:
        """Return all nodes, read again if a heartbeat answered another state."""
        return self._nodes if state == self._nodes_state != "" else self.refresh_nodes(state)

    def arming(self, node_id: NodeId) -> threading.Lock:
        """Return this process's lock for arming a node."""
        # However many members need it, one connection does.
        return self._arming.setdefault(node_id, threading.Lock())

    @property
    def nodes(self) -> dict[NodeId, Node]:
        """All nodes as last read."""
        return self._nodes

    @property
    def armed_at(self) -> dict[NodeId, datetime | None]:
        """Each node's last arming as last read."""
        return self._armed_at

    def listen(self, heard: Callable[[], None] = lambda: None) -> None:
        """Expire a topic's route at each new version, then call `heard`; best effort."""

        def forget(topic: str) -> None:
            self._forget(topic)
            heard()

        if self._notices is None:
            self._notices = NotificationListener(self._database, ROUTE, forget)
            self._notices.start()

    def close(self) -> None:
        """Stop listening."""
        if self._notices is not None:
            self._notices.close()

    def _forget(self, topic: str) -> None:
        # Without a topic, all routes expire.
        with self._lock:
            for name in [topic] if topic else list(self._routes):
                known = self._routes.get(name)
                if known is not None:
                    self._routes[name] = (known[0], float("-inf"))


def load_route(database: Database, topic: str) -> Route:
    """Read the route version in force. Raises NotFound."""
    with database.connection() as connection:
        rows = connection.execute(query("route_in_force"), {"name": topic}).fetchall()
    if not rows:
        raise NotFound("topic", topic, f"create it: mqlayer topic create {topic}")
    topic_id, version, body_limit, backlog_limit, strategy, durability, since = rows[0][:7]
    if version is None:
        raise NotFound("topic", topic, f"its creation was cut off, finish it: mqlayer topic create {topic}")
    ranges = tuple(
        LpRange(lp_from, lp_to, PartitionId(partition), NodeId(node)) for *_, lp_from, lp_to, partition, node in rows
    )
    return Route(
        topic_id,
        topic,
        RouteVersion(version),
        ranges,
        body_limit,
        backlog_limit,
        best_effort=strategy == "best_effort",
        durability=durability,
        since=since,
    )


def load_nodes(database: Database) -> list[Node]:
    """Read all registered nodes."""
    with database.connection() as connection:
        return nodes_by(connection)


def node_names(database: Database) -> dict[NodeId, str]:
    """Return the names of all nodes; removed ones are NAME@ID."""
    with database.connection() as connection:
        return {NodeId(node_id): name for node_id, name in connection.execute(query("node_names")).fetchall()}


def nodes_by(connection: Connection) -> list[Node]:
    """Read all nodes over the caller's connection.

    With locks held, waiting for a second pool connection could deadlock.
    """
    return [node for node, _ in _read_nodes(connection)]


def _read_nodes(connection: Connection) -> list[tuple[Node, datetime | None]]:
    rows = connection.execute(query("node_list")).fetchall()
    return [(Node(NodeId(row[0]), *row[1:7]), row[7]) for row in rows]
