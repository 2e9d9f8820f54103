"""Register Redis nodes, and arm them again after they restarted."""

from __future__ import annotations

import logging
from typing import Final

import redis

from mqlayer.domain.names import check_name
from mqlayer.domain.routing import NodeId
from mqlayer.errors import Conflict, InvalidInput, NotFound, redact
from mqlayer.failpoints import failpoint
from mqlayer.postgres.audit import note
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redis.nodes import Node, NodeConnection, raise_for_reply
from mqlayer.redis.partitions import raise_command
from mqlayer.routes.cache import load_nodes
from mqlayer.topics.mending import Mender

log = logging.getLogger(__name__)

PATIENCE: Final = {"lock_wait": "10s", "idle": "30s"}
"""A process that is stopped while it arms a node must not keep all others from arming it."""


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
    database: Database,
    name: str,
    *,
    prefix: str,
    application: Database | None = None,
    accept_loss: bool = False,
    accept_loss_of: frozenset[int] = frozenset(),
    actor: str = "api",
    unsafe: bool = False,
) -> tuple[Node, int]:
    """Bring a node that restarted or lost data back into service; return it and how many assignments got a new epoch.

    In one transaction that holds the node's row: raise the epoch of every assignment on the node, put those epochs in
    force in Redis, bring its partitions to what Postgres says (see `mending`), record the run as armed. No earlier ack
    passes from then on, so none can settle a message that was given an old offset after a fall-back. A crash in between
    leaves the node unarmed; anybody does it again. A node that is armed and as it has to be is left as it is.
    `application` is the database of the outbox that may have to send something again. Raises ConfigurationRefused where
    the node holds its partitions under another key prefix, StoreUnavailable where another outbox's relay has to do its
    part, Conflict where an outbox does not hold any more what is lost, unless `accept_loss`, or the partition is one of
    `accept_loss_of`.
    """

    def work(connection: Connection) -> int:
        connection.execute(query("transaction_patience"), PATIENCE)
        row = connection.execute(query("node_lock"), {"name": name}).fetchone()
        if row is None:
            raise NotFound("node", name, "register it: mqlayer node register NAME URL")
        node = Node(*row)
        with NodeConnection(node, any_run=True, unsafe=unsafe) as line:
            run_id = line.connect().run_id
            mender = Mender(
                connection,
                line,
                prefix=prefix,
                application=application,
                accept_loss=accept_loss,
                accept_loss_of=accept_loss_of,
            )
            if not mender.needed and run_id == node.armed_run_id:
                return 0
            raised = connection.execute(query("node_epochs_raise"), {"node_id": node.node_id}).fetchall()
            failpoint("rearm.before_raise")
            replies = line.call(
                [raise_command(line, prefix, partition, group, epoch) for group, partition, epoch in raised]
            )
            for reply in replies:
                raise_for_reply(reply, node.address)
            failpoint("rearm.before_remake")
            mender.mend()
            failpoint("rearm.before_arm")
        connection.execute(query("node_arm"), {"node_id": node.node_id, "run_id": run_id})
        facts = {"run_id": run_id, "epochs": len(raised)} | mender.mended.facts()
        note(connection, actor, "node rearm", name, facts)
        log.warning("node_rearmed", extra={"node": name} | facts)
        return len(raised)

    epochs = database.transaction(work)
    return find_node(database, name), epochs


def _candidate(name: str, url: str) -> Node:
    try:
        redis.ConnectionPool.from_url(url)
    except ValueError as error:
        raise InvalidInput(f"bad Redis URL: {error}; use redis://host:port/db or rediss://…") from None
    return Node(NodeId(0), name, url, None)
