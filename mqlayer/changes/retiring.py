"""Retire partitions: sealed ones that every group has drained leave a tombstone, and nothing else.

States: *sealed* -> *deleted* (in Postgres; Redis still holds it) -> buried (only the tombstone is left). A crash
between is made up for by the next pass. The tombstone stays for ever: a missing partition must never mean "open".
"""

from __future__ import annotations

import logging
from typing import Any, Final

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.redis.nodes import NodeConnection, raise_for_reply
from mqlayer.redis.partitions import retire_command
from mqlayer.routes.cache import load_nodes

log = logging.getLogger(__name__)

PER_PASS: Final = 1_000


def retire_partitions(database: Database, *, prefix: str, unsafe: bool = False) -> list[int]:
    """Delete sealed partitions that every group of their topic has drained; return those of which all is gone now.

    A topic without any group keeps everything. Successors of dropped changes go too. What is on a node that is away
    is left for the next pass. Safe to run twice at once.
    """
    ended: list[int] = database.transaction(
        lambda connection: [row[0] for row in connection.execute(query("partition_retire")).fetchall()]
    )
    failpoint("retire.after_mark")
    with database.connection() as connection:
        rows = connection.execute(query("partition_unburied"), {"limit": PER_PASS}).fetchall()
    by_node: dict[NodeId, list[tuple[int, list[int]]]] = {}
    for partition, node_id, groups in rows:
        by_node.setdefault(NodeId(node_id), []).append((partition, groups))
    nodes = {node.node_id: node for node in load_nodes(database)}
    buried: list[int] = []
    for node_id, work in by_node.items():
        try:
            with NodeConnection(nodes[node_id], unsafe=unsafe) as line:
                for reply in line.call([retire_command(line, prefix, p, groups) for p, groups in work]):
                    raise_for_reply(reply, line.node.address)
        except MqlayerError as error:
            facts: dict[str, Any] = {"node": nodes[node_id].name, "reason": str(error)}
            log.warning("retire_node_passed_by", extra=facts)
        else:
            buried += [partition for partition, _ in work]
    failpoint("retire.after_bury")
    if buried:
        with database.connection() as connection:
            connection.execute(query("partition_buried"), {"partitions": buried})
        log.info("partitions_retired", extra={"ended": ended, "buried": buried})
    return buried
