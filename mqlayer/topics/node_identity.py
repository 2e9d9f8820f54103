"""Refuse a second name for one Redis: `docs/design/arming-nodes.md`."""

from __future__ import annotations

from typing import Final

from mqlayer.errors import Conflict
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.partition_scripts import ends_command, ends_reply
from mqlayer.runtime.runtime import Runtime

ASKED_AT_ONCE: Final = 500
HELD: Final = ("importing", "open", "sealed")
"""States of partitions with records; a tombstone has none."""


def refuse_partitions(runtime: Runtime, node_connection: NodeConnection) -> None:
    """Refuse a new node whose Redis holds partitions already: another node's Redis after a restart, or its copy."""
    after = 0
    while True:
        facts = {"after": after, "limit": ASKED_AT_ONCE}
        with runtime.control.connection() as connection:
            rows = connection.execute(query("partitions_placed"), facts).fetchall()
        if not rows:
            return
        address = node_connection.node.address
        replies = node_connection.call([ends_command(node_connection, runtime.prefix, row[0]) for row in rows])
        for (partition, name), reply in zip(rows, replies, strict=True):
            if ends_reply(reply, address).state in HELD:
                raise Conflict(
                    f"{address} holds partition {partition} of node {name!r}",
                    f"one Redis is one node: where that node is there now, say mqlayer node set {name} --url URL; "
                    "else register an empty Redis",
                )
        after = rows[-1][0]


def refuse_known_server(connection: Connection, node: Node, run_id: str) -> None:
    """Refuse to register a Redis that is another node's, armed or not."""
    for name, _ in connection.execute(query("nodes_of_process"), {"name": node.name, "run_id": run_id}).fetchall():
        raise Conflict(
            f"{node.address} is the Redis of node {name!r} already",
            f"one Redis is one node: register another Redis, or remove the old name first: mqlayer node remove {name}",
        )


def refuse_armed_server(connection: Connection, node: Node, run_id: str) -> None:
    """Refuse to arm a Redis that is armed as another node."""
    rows = connection.execute(query("nodes_of_process"), {"name": node.name, "run_id": run_id}).fetchall()
    for name in [name for name, is_armed in rows if is_armed]:
        raise Conflict(
            f"{node.address}, the address of node {node.name!r}, leads to the Redis of node {name!r}",
            f"one Redis is one node: correct the address, mqlayer node set {node.name} --url URL; or give the node up, "
            f"mqlayer node lost {node.name}",
        )
