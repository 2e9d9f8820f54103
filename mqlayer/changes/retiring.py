"""Retire partitions: sealed ones that every group has drained leave a tombstone, and nothing else.

States: *sealed* -> *deleted* (in Postgres; Redis still holds it) -> buried (only the tombstone is left). A crash
between is made up for by the next pass. The tombstone stays for ever: a missing partition must never mean "open". Of an
archived topic, what became of messages stays besides until the archiver has fetched it; it is not buried before.
"""

from __future__ import annotations

import logging
from typing import Final

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.redis.nodes import Node, NodeConnection
from mqlayer.redis.partitions import retire_command, retire_reply
from mqlayer.routes.cache import load_nodes

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
    buried: list[int] = []
    passed_by: set[NodeId] = set()
    while True:
        work = _unburied(database, passed_by)
        nodes = {node.node_id: node for node in load_nodes(database)}
        done: list[int] = []
        silent: set[NodeId] = set()
        for node_id, partitions in work.items():
            gone = _bury(nodes[node_id], partitions, prefix=prefix, unsafe=unsafe)
            if gone is None:
                silent.add(node_id)
            else:
                done += gone
        failpoint("retire.after_bury")
        if done:
            with database.connection() as connection:
                connection.execute(query("partition_buried"), {"partitions": done})
        buried += done
        passed_by |= silent
        # The places that a silent node took in a round go to the others in the next one.
        if not silent:
            break
    if buried:
        log.info("partitions_retired", extra={"ended": ended, "buried": buried})
    return buried


Unburied = list[tuple[int, list[int], bool]]
"""Partitions, with the groups that have keys there, and whether what became of messages is for the archive."""


def _unburied(database: Database, passed_by: set[NodeId]) -> dict[NodeId, Unburied]:
    """Return the oldest partitions to bury, per node, but for those of nodes that were passed by."""
    facts = {"limit": PER_ROUND, "passed_by": list(passed_by)}
    with database.connection() as connection:
        rows = connection.execute(query("partition_unburied"), facts).fetchall()
    found: dict[NodeId, Unburied] = {}
    for partition, node_id, groups, archived in rows:
        found.setdefault(NodeId(node_id), []).append((partition, groups, archived))
    return found


def _bury(node: Node, partitions: Unburied, *, prefix: str, unsafe: bool) -> list[int] | None:
    """Leave nothing but tombstones of partitions; return those of which that is so. None: their node is away."""
    try:
        with NodeConnection(node, unsafe=unsafe) as line:
            commands = [
                retire_command(line, prefix, p, groups, archived=archived) for p, groups, archived in partitions
            ]
            replies = line.call(commands)
            gone = [retire_reply(reply, node.address) for reply in replies]
    except MqlayerError as error:
        log.warning("retire_node_passed_by", extra={"node": node.name, "reason": str(error)})
        return None
    done = [partition for (partition, *_), all_gone in zip(partitions, gone, strict=True) if all_gone]
    if len(done) < len(partitions):
        log.info("retire_waits_for_archiver", extra={"node": node.name, "partitions": len(partitions) - len(done)})
    return done
