"""Connections to nodes, one each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

from mqlayer.domain.routing import NodeId
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime


class NodePool:
    """Connections of one thread, opened on use and closed together.

    `find` returns a node's newest known run and address; a connection to another one closes at its next use.
    """

    def __init__(self, runtime: Runtime, find: Callable[[NodeId], Node], role: RedisRole | None = None) -> None:
        self._runtime, self._find, self._role = runtime, find, role
        self._by_node: dict[NodeId, NodeConnection] = {}

    @classmethod
    def of_registered(cls, runtime: Runtime, role: RedisRole | None = None) -> Self:
        """Return a pool of the nodes registered now; nodes armed later stay as they were read."""
        nodes: Mapping[NodeId, Node] = {node.node_id: node for node in load_nodes(runtime.control)}
        return cls(runtime, nodes.__getitem__, role)

    def to(self, node_id: NodeId) -> NodeConnection:
        """Return the connection to a node. Raises KeyError for an unregistered one."""
        node = self._find(node_id)
        connection = self._by_node.get(node_id)
        if connection is None:
            connection = self._by_node[node_id] = self._runtime.connection(node, self._role)
        elif connection.node != node:
            connection.node = node
        return connection

    def close(self) -> None:
        """Close all connections."""
        for connection in self._by_node.values():
            connection.close()
        self._by_node = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
