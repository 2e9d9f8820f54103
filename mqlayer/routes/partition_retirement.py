"""Retire partitions: sealed ones that every group has drained leave only a tombstone.

*sealed* -> *deleted* in Postgres -> deleted on the node; a later pass completes a crash between them. See
docs/design/route-changes.md, "Retiring parents".
"""

from __future__ import annotations

from typing import Final

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Node
from mqlayer.redis.partition_scripts import retire_command, retire_reply
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

PER_ROUND: Final = 1_000


def retire_partitions(runtime: Runtime) -> list[int]:
    """Delete sealed partitions that every group has drained; return those fully removed.

    Topics without groups keep theirs. Includes successors of dropped changes. Outcomes of archived topics wait for the
    archiver, unavailable nodes for a later pass. Safe to call concurrently.
    """
    ended: list[int] = runtime.control.transaction(
        lambda connection: [row[0] for row in connection.execute(query("partition_retire")).fetchall()]
    )
    failpoint("retire.after_mark")
    deleted: list[int] = []
    skipped_nodes: set[NodeId] = set()
    while True:
        work = _undeleted(runtime.control, skipped_nodes)
        nodes = {node.node_id: node for node in load_nodes(runtime.control)}
        done: list[int] = []
        silent: set[NodeId] = set()
        for node_id, partitions in work.items():
            gone = _delete(runtime, nodes[node_id], partitions)
            if gone is None:
                silent.add(node_id)
            else:
                done += gone
        failpoint("retire.after_delete")
        if done:
            with runtime.control.connection() as connection:
                connection.execute(query("partition_deleted"), {"partitions": done})
        deleted += done
        skipped_nodes |= silent
        # Other nodes get the silent nodes' share of the limit in the next round.
        if not silent:
            break
    if deleted:
        log.info("partitions_retired", extra={"ended": ended, "deleted": deleted})
    return deleted


Undeleted = list[tuple[int, list[int], bool]]
"""Partition, groups with keys there, whether outcomes await the archiver."""


def _undeleted(database: Database, skipped_nodes: set[NodeId]) -> dict[NodeId, Undeleted]:
    facts = {"limit": PER_ROUND, "skipped_nodes": list(skipped_nodes)}
    with database.connection() as connection:
        rows = connection.execute(query("partitions_to_delete"), facts).fetchall()
    found: dict[NodeId, Undeleted] = {}
    for partition, node_id, groups, archived in rows:
        found.setdefault(NodeId(node_id), []).append((partition, groups, archived))
    return found


def _delete(runtime: Runtime, node: Node, partitions: Undeleted) -> list[int] | None:
    try:
        with runtime.connection(node) as connection:
            commands = [
                retire_command(connection, runtime.prefix, p, groups, archived=archived)
                for p, groups, archived in partitions
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
