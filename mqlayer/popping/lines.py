"""A receiver's connections to nodes: one that asks and waits, one that settles, so that neither holds up the other."""

from __future__ import annotations

from typing import Any

from mqlayer.domain.routing import NodeId
from mqlayer.redis.nodes import Command, NodeConnection, connection_of, is_missing_script
from mqlayer.redis.roles import RedisRole
from mqlayer.routes.cache import RouteCache
from mqlayer.settings import Settings


class Lines:
    """Connections by node, opened at first need; for one thread at a time."""

    def __init__(self, routes: RouteCache, settings: Settings) -> None:
        self._routes, self._settings = routes, settings
        self._by_node: dict[NodeId, NodeConnection] = {}

    def to(self, node_id: NodeId) -> NodeConnection:
        """Return the connection to a node, which takes the run and address that count as far as this process knows."""
        node = self._routes.node(node_id)
        line = self._by_node.get(node_id)
        if line is None:
            settings = self._settings
            line = self._by_node[node_id] = connection_of(node, settings, RedisRole.CONSUMER)
        line.node = node
        return line

    def close(self) -> None:
        """Close all."""
        for line in self._by_node.values():
            line.close()
        self._by_node = {}


def call_scripts(line: NodeConnection, commands: list[Command]) -> list[Any]:
    """Send script calls in one write; those that a server without the scripts did not run are sent once more."""
    replies = line.call(commands)
    missing = [number for number, reply in enumerate(replies) if is_missing_script(reply)]
    if missing:
        line.reload_scripts()
        again = line.call([commands[number] for number in missing])
        for number, reply in zip(missing, again, strict=True):
            replies[number] = reply
    return replies
