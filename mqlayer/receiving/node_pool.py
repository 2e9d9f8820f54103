"""A receiver's connections: separate pools fetch and settle, so neither delays the other."""

from __future__ import annotations

from typing import Any

from mqlayer.domain.routing import NodeId
from mqlayer.redis.node_connection import Command, NodeConnection, connection_of, is_missing_script
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.settings import Settings


class NodePool:
    """Connections by node; one thread at a time."""

    def __init__(self, routes: RouteCache, settings: Settings) -> None:
        self._routes, self._settings = routes, settings
        self._by_node: dict[NodeId, NodeConnection] = {}

    def to(self, node_id: NodeId) -> NodeConnection:
        """Return a node's connection to its newest known run and address."""
        node = self._routes.node(node_id)
        connection = self._by_node.get(node_id)
        if connection is None:
            settings = self._settings
            connection = self._by_node[node_id] = connection_of(node, settings, RedisRole.CONSUMER)
        connection.node = node
        return connection

    def close(self) -> None:
        """Close all."""
        for connection in self._by_node.values():
            connection.close()
        self._by_node = {}


def call_scripts(connection: NodeConnection, commands: list[Command]) -> list[Any]:
    """Send calls in one write; repeat once those that get NOSCRIPT."""
    replies = connection.call(commands)
    missing = [number for number, reply in enumerate(replies) if is_missing_script(reply)]
    if missing:
        connection.reload_scripts()
        again = connection.call([commands[number] for number in missing])
        for number, reply in zip(missing, again, strict=True):
            replies[number] = reply
    return replies
