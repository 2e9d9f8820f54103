"""Begin and end the draining of nodes; remove empty ones. States and crashes: docs/design/draining-nodes.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from mqlayer.domain.names import check_name, check_zone
from mqlayer.errors import Conflict
from mqlayer.failpoints import failpoint
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Node
from mqlayer.runtime.route_cache import nodes_by
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.nodes import find_node

TIMEOUTS: Final = {"lock_wait": "10s", "idle": "5s"}
MOVING: Final = ("importing", "open")
"""States of partitions that a drain moves."""


def find_target(database: Database, name: str) -> Node:
    """Return a node that may get partitions. Raises NotFound; Conflict while it drains."""
    node = find_node(database, name)
    if node.draining_at is not None:
        raise draining_conflict(name)
    return node


def draining_conflict(name: str) -> Conflict:
    """Return the refusal of a partition on a draining node."""
    return Conflict(
        f"node {name!r} is being drained: it gets no partitions",
        f"name another node, or let it have some again: mqlayer node drain {name} --stop",
    )


def no_target_conflict(name: str, nodes: Iterable[Node]) -> Conflict:
    """Return the refusal to drain a node while no other can take its partitions."""
    reasons = []
    for other in nodes:
        if other.name == name:
            continue
        if other.draining_at is not None:
            reasons.append(f"{other.name} is being drained, end that: mqlayer node drain {other.name} --stop")
        elif other.armed_run_id is None:
            reasons.append(f"{other.name} is not armed: mqlayer node rearm {other.name}")
        else:
            reasons.append(f"{other.name} does not answer: start its Redis again")
    return Conflict(
        f"no other node can take the partitions of node {name!r}",
        "; or ".join([*reasons, "register another Redis: mqlayer node register NAME URL"]),
    )


def begin_drain(runtime: Runtime, name: str) -> bool:
    """Let a node get no more partitions; return whether it got some. Audited.

    Raises Conflict without another node to move to, and for a given-up node.
    """
    node = find_node(runtime.control, name)

    def work(connection: Connection) -> bool:
        connection.execute(query("transaction_patience"), TIMEOUTS)
        if connection.execute(query("node_drain"), {"node_id": node.node_id}).fetchone() is None:
            _refuse_lost(connection, node)
            return False
        # Drains of the last two nodes at once would each count on the other node.
        connection.execute(query("nodes_lock"))
        nodes = nodes_by(connection)
        if not any(other.takes_partitions for other in nodes if other.node_id != node.node_id):
            raise no_target_conflict(name, nodes)
        write_audit(connection, runtime.actor, "node drain", name, {})
        failpoint("drain.before_mark_commit")
        return True

    return runtime.control.transaction(work)


def stop_drain(runtime: Runtime, name: str) -> bool:
    """Let a node get partitions again; return whether it got none. Audited. Moved ones stay where they are."""
    node = find_node(runtime.control, name)

    def work(connection: Connection) -> bool:
        if connection.execute(query("node_drain_stop"), {"node_id": node.node_id}).fetchone() is None:
            return False
        write_audit(connection, runtime.actor, "node drain stop", name, {})
        return True

    return runtime.control.transaction(work)


def remove_node(runtime: Runtime, name: str) -> None:
    """Remove an empty node; its name is free then. Audited. Raises NotFound, Conflict while it is needed."""
    node = find_node(runtime.control, name)
    facts = {"node_id": node.node_id}

    def work(connection: Connection) -> None:
        connection.execute(query("transaction_patience"), TIMEOUTS)
        # From here on nothing comes to it.
        row = connection.execute(query("node_remove_lock"), facts).fetchone()
        if row is None:
            return
        lost = bool(row[1])
        left = connection.execute(query("node_left"), facts | {"lost": lost}).fetchall()
        if left:
            counts = ", ".join(f"{count} {state}" for state, count in left)
            raise Conflict(f"node {name!r} holds partitions: {counts}", f"mqlayer node drain {name} --yes first")
        _keep_a_target(connection, node)
        if lost:
            gone = [row[0] for row in connection.execute(query("node_deleted_partitions"), facts).fetchall()]
            connection.execute(query("partition_deleted"), {"partitions": gone})
        connection.execute(query("node_remove"), facts)
        write_audit(connection, runtime.actor, "node remove", name, {"node": node.node_id})
        failpoint("drain.before_remove_commit")

    runtime.control.transaction(work)


def set_node_zone(runtime: Runtime, name: str, zone: str) -> bool:
    """Say in which zone a node is, "" for none; return whether that changed. Audited. Raises InvalidInput."""
    check_name("node", name)
    check_zone(zone)
    node = find_node(runtime.control, name)
    if node.zone == zone:
        return False

    def work(connection: Connection) -> None:
        connection.execute(query("node_zone_put"), {"node_id": node.node_id, "zone": zone})
        write_audit(connection, runtime.actor, "node zone", name, {"zone": zone, "before": node.zone})

    runtime.control.transaction(work)
    return True


def _keep_a_target(connection: Connection, node: Node) -> None:
    """Refuse to remove the last node that partitions of draining ones can move to."""
    # A drain that begins at once counts on this node.
    connection.execute(query("nodes_lock"))
    others = [other for other in nodes_by(connection) if other.node_id != node.node_id]
    if any(other.takes_partitions for other in others):
        return
    for other in others:
        left = connection.execute(query("node_left"), {"node_id": other.node_id, "lost": False}).fetchall()
        if other.draining_at is not None and any(state in MOVING for state, _ in left):
            raise Conflict(
                f"node {other.name!r} is being drained, and only node {node.name!r} can take its partitions",
                f"end that: mqlayer node drain {other.name} --stop; or register another Redis: "
                "mqlayer node register NAME URL",
            )


def _refuse_lost(connection: Connection, node: Node) -> None:
    now = next((one for one in nodes_by(connection) if one.node_id == node.node_id), None)
    if now is None or now.draining_at is None:
        raise Conflict(
            f"node {node.name!r} was given up, and drains no more", f"mqlayer node lost {node.name} moves what is left"
        )
