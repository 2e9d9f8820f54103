"""Marks of direct producers that ended: nobody can continue their chains, so nobody needs them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.nodes import Command, Node, NodeConnection, raise_for_reply
from mqlayer.routes.cache import load_nodes

log = logging.getLogger(__name__)

CLOSED_FOR_S: Final = 86_400.0
"""How long ago a source was closed at the least: nothing that it sent is on its way any more."""
SOURCES_PER_PASS: Final = 20
PARTITIONS_PER_WRITE: Final = 50


def drop_closed_marks(
    database: Database, *, prefix: str, unsafe: bool = False, closed_for_s: float = CLOSED_FOR_S
) -> int:
    """Remove the marks of some direct sources that Postgres says are closed; return of how many.

    Safe to run twice at once and to be killed at any line: a source counts as done when every node has answered. While
    a node is away the sources are tried again by the next pass.
    """
    with database.connection() as connection:
        facts = {"closed_for_s": closed_for_s, "limit": SOURCES_PER_PASS}
        sources = [row[0] for row in connection.execute(query("source_list_closed"), facts)]
        if not sources:
            return 0
        partitions = connection.execute(query("partition_places")).fetchall()
    nodes = {node.node_id: node for node in load_nodes(database)}
    by_node: dict[NodeId, list[Command]] = {}
    for partition, node_id, lp_from, lp_to in partitions:
        marks = partition_keys(prefix, partition).marks
        names = (b"%d:%d" % (source, lp) for source in sources for lp in range(lp_from, lp_to))
        by_node.setdefault(NodeId(node_id), []).append(("HDEL", marks, *names))
    if not all(_drop(nodes[node_id], commands, unsafe=unsafe) for node_id, commands in by_node.items()):
        return 0
    failpoint("marks.before_record")
    with database.connection() as connection:
        connection.execute(query("source_marks_dropped"), {"source_ids": sources})
    log.info("closed_marks_dropped", extra={"sources": len(sources)})
    return len(sources)


def _drop(node: Node, commands: list[Command], *, unsafe: bool) -> bool:
    """Send the commands in bounded writes; say whether the node took them."""
    try:
        with NodeConnection(node, unsafe=unsafe) as line:
            for some in _slices(commands):
                for reply in line.call(some):
                    raise_for_reply(reply, node.address)
    except MqlayerError as error:
        log.warning("marks_node_passed_by", extra={"node": node.name, "reason": str(error)})
        return False
    return True


def _slices(commands: list[Command]) -> Iterable[list[Command]]:
    return (commands[at : at + PARTITIONS_PER_WRITE] for at in range(0, len(commands), PARTITIONS_PER_WRITE))
