"""Register Redis nodes, and arm them again after they restarted."""

from __future__ import annotations

import logging
from typing import Any

import redis
from psycopg.types.json import Jsonb

from mqlayer.domain.names import check_name
from mqlayer.domain.routing import NodeId
from mqlayer.errors import Conflict, InvalidInput, NotFound, redact
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redis.nodes import Node, NodeConnection, raise_for_reply
from mqlayer.redis.partitions import raise_command
from mqlayer.routes.cache import load_nodes

log = logging.getLogger(__name__)


def register_node(database: Database, *, name: str, url: str, actor: str = "api", unsafe: bool = False) -> Node:
    """Register a Redis as a node and arm its present run. The same name and URL again changes nothing.

    Raises ConfigurationRefused for settings that void the promise, Conflict for a name with another URL.
    """
    check_name("node", name)
    with NodeConnection(_candidate(name, url), any_run=True, unsafe=unsafe) as line:
        run_id = line.connect().run_id

    def work(connection: Connection) -> None:
        new = connection.execute(query("node_insert"), {"name": name, "url": url, "run_id": run_id}).fetchone()
        if new is not None:
            note(connection, actor, "node register", name, {"url": redact(url)})

    database.transaction(work)
    node = find_node(database, name)
    if node.url != url:
        raise Conflict(f"node {name!r} is registered as {node.address}", "choose another name for another Redis")
    return node


def list_nodes(database: Database) -> list[Node]:
    """Return all nodes, oldest first."""
    return load_nodes(database)


def find_node(database: Database, name: str) -> Node:
    """Return a node. Raises NotFound."""
    for node in load_nodes(database):
        if node.name == name:
            return node
    raise NotFound("node", name, "register it: mqlayer node register NAME URL")


def rearm_node(
    database: Database, name: str, *, prefix: str, actor: str = "api", unsafe: bool = False
) -> tuple[Node, int]:
    """Bring a node that restarted back into service; return it and how many assignments got a new epoch.

    In one transaction that holds the node's row: raise the epoch of every assignment on the node, put those epochs in
    force in Redis, record the run as armed. No earlier ack passes from then on, so none can settle a message that was
    given an old offset after a fall-back. A crash in between leaves the node unarmed; anybody does it again.
    """

    def work(connection: Connection) -> int:
        row = connection.execute(query("node_lock"), {"name": name}).fetchone()
        if row is None:
            raise NotFound("node", name, "register it: mqlayer node register NAME URL")
        node = Node(*row)
        with NodeConnection(node, any_run=True, unsafe=unsafe) as line:
            run_id = line.connect().run_id
            if run_id == node.armed_run_id:
                return 0
            raised = connection.execute(query("node_epochs_raise"), {"node_id": node.node_id}).fetchall()
            failpoint("rearm.before_raise")
            replies = line.call(
                [raise_command(line, prefix, partition, group, epoch) for group, partition, epoch in raised]
            )
            for reply in replies:
                raise_for_reply(reply, node.address)
            failpoint("rearm.before_arm")
        connection.execute(query("node_arm"), {"node_id": node.node_id, "run_id": run_id})
        note(connection, actor, "node rearm", name, {"run_id": run_id, "epochs": len(raised)})
        return len(raised)

    count = database.transaction(work)
    if count:
        log.warning("node_rearmed", extra={"node": name, "epochs": count})
    return find_node(database, name), count


def note(connection: Connection, actor: str, act: str, target: str, facts: dict[str, Any]) -> None:
    """Write an audit row in the caller's transaction (invariant 19)."""
    connection.execute(query("audit_insert"), {"actor": actor, "act": act, "object": target, "facts": Jsonb(facts)})


def _candidate(name: str, url: str) -> Node:
    try:
        redis.ConnectionPool.from_url(url)
    except ValueError as error:
        raise InvalidInput(f"bad Redis URL: {error}; use redis://host:port/db or rediss://…") from None
    return Node(NodeId(0), name, url, None)
