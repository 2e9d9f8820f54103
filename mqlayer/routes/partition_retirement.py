"""Retire partitions: sealed ones that every group has drained leave a tombstone, and nothing else.

States: *sealed* -> *deleted* (in Postgres; Redis still holds it) -> deleted (only the tombstone is left). A crash
between is made up for by the next pass. The tombstone stays for ever: a missing partition must never mean "open". Of an
archived topic, what became of messages stays besides until the archiver has fetched it; it is not deleted before.
"""

from __future__ import annotations

import logging
from typing import Final

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.partition_scripts import retire_command, retire_reply
from mqlayer.runtime.route_cache import load_nodes

log = logging.getLogger(__name__)

PER_ROUND: Final = 1_000


def retire_partitions(database: Database, *, prefix: str, unsafe: bool = False) -> list[int]:
    """Delete sealed partitions that every group of their topic has drained; return those of which all is gone now.

    A topic without any group keeps everything. Successors of dropped changes go too. What is on a node that is away
    is left for the next pass, and keeps nothing waiting that is elsewhere. Safe to run twice at once.
    """
    ended: list[int] = database.transaction(
        lambda connection: [row[0] for row in connection.execute(query("partition_retire")).fetchall()]
    )
    failpoint("retire.after_mark")
    deleted: list[int] = []
    skipped_nodes: set[NodeId] = set()
    while True:
        work = _undeleted(database, skipped_nodes)
        nodes = {node.node_id: node for node in load_nodes(database)}
        done: list[int] = []
        silent: set[NodeId] = set()
        for node_id, partitions in work.items():
            gone = _delete(nodes[node_id], partitions, prefix=prefix, unsafe=unsafe)
            if gone is None:
                silent.add(node_id)
            else:
                done += gone
        failpoint("retire.after_delete")
        if done:
            with database.connection() as connection:
                connection.execute(query("partition_deleted"), {"partitions": done})
        deleted += done
        skipped_nodes |= silent
        # The places that a silent node took in a round go to the others in the next one.
        if not silent:
            break
    if deleted:
        log.info("partitions_retired", extra={"ended": ended, "deleted": deleted})
    return deleted


Undeleted = list[tuple[int, list[int], bool]]
"""Partitions, with the groups that have keys there, and whether what became of messages is for the archive."""


def _undeleted(database: Database, skipped_nodes: set[NodeId]) -> dict[NodeId, Undeleted]:
    """Return the oldest partitions to delete, per node, but for those of nodes that were passed by."""
    facts = {"limit": PER_ROUND, "skipped_nodes": list(skipped_nodes)}
    with database.connection() as connection:
        rows = connection.execute(query("partitions_to_delete"), facts).fetchall()
    found: dict[NodeId, Undeleted] = {}
    for partition, node_id, groups, archived in rows:
        found.setdefault(NodeId(node_id), []).append((partition, groups, archived))
    return found


def _delete(node: Node, partitions: Undeleted, *, prefix: str, unsafe: bool) -> list[int] | None:
    """Leave nothing but tombstones of partitions; return those of which that is so. None: their node is away."""
    try:
        with NodeConnection(node, unsafe=unsafe) as connection:
            commands = [
                retire_command(connection, prefix, p, groups, archived=archived) for p, groups, archived in partitions
            ]
            replies = connection.call(commands)
            gone = [retire_reply(reply, node.address) for reply in replies]
    except MqlayerError as error:
        log.warning("retire_node_skipped", extra={"node": node.name, "reason": str(error)})
        return None
    done = [partition for (partition, *_), all_gone in zip(partitions, gone, strict=True) if all_gone]
    if len(done) < len(partitions):
        log.info("retirement_waits_for_archiver", extra={"node": node.name, "partitions": len(partitions) - len(done)})
    return done
