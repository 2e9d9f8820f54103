"""Set a topic's durability class, and a node's replicas: `docs/design/durability.md`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from mqlayer.domain.durability import NODE, REPLICAS_LIMIT, Durability, check_durability
from mqlayer.domain.names import check_name
from mqlayer.domain.protocol import DURABILITY
from mqlayer.domain.routing import NodeId
from mqlayer.errors import Conflict, InvalidInput, MqlayerError, NotFound
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection
from mqlayer.postgres.protocol import read_protocols
from mqlayer.postgres.queries import query
from mqlayer.redis.durability import refuse_server
from mqlayer.redis.node_connection import Node
from mqlayer.runtime.route_cache import load_nodes, nodes_by
from mqlayer.runtime.runtime import Runtime

ANSWER_WITHIN_S: Final = 3.0
TIMEOUTS: Final = {"lock_wait": "5s", "idle": "30s"}


def set_durability(runtime: Runtime, name: str, durability: Durability) -> bool:
    """Change a topic's durability class; return whether that changed anything. Audited.

    Relays follow at once, direct producers within 5 s. Raises NotFound, InvalidInput, Conflict; ConfigurationRefused
    for a node that can't hold it.
    """
    check_durability(durability)

    def work(connection: Connection) -> bool:
        connection.execute(query("transaction_patience"), TIMEOUTS)
        row = connection.execute(query("topic_durability_lock"), {"name": name}).fetchone()
        if row is None:
            raise NotFound("topic", name, f"create it: mqlayer topic create {name}")
        topic_id, before, deleting = row
        if deleting:
            raise Conflict(f"topic {name!r} is being deleted", f"finish that first: mqlayer topic delete {name} --yes")
        if before == durability:
            return False
        _refuse_before_finalization(connection, durability)
        node_ids = {row[0] for row in connection.execute(query("topic_nodes"), {"topic_id": topic_id}).fetchall()}
        refuse_nodes(runtime, [node for node in nodes_by(connection) if node.node_id in node_ids], durability)
        connection.execute(query("topic_durability_put"), {"topic_id": topic_id, "durability": durability})
        facts = {"durability": durability, "before": {"durability": before}}
        write_audit(connection, runtime.actor, "topic set", name, facts)
        return True

    return runtime.control.transaction(work)


def refuse_class(runtime: Runtime, durability: Durability) -> None:
    """Raise ConfigurationRefused or Conflict if a new topic can't have a class."""
    check_durability(durability)
    with runtime.control.connection() as connection:
        _refuse_before_finalization(connection, durability)
        nodes = [node for node in nodes_by(connection) if node.takes_partitions]
    refuse_nodes(runtime, nodes, durability)


def _refuse_before_finalization(connection: Connection, durability: Durability) -> None:
    """Raise Conflict for a class that older code, which may live, does not keep."""
    if durability == NODE or read_protocols(connection, DURABILITY.schema).served.in_force >= DURABILITY.since:
        return
    raise Conflict(
        "relays and producers of the former release know no durability classes, and may live",
        "run `mqlayer upgrade finalize` first",
    )


def refuse_nodes(runtime: Runtime, nodes: Iterable[Node], durability: Durability) -> None:
    """Raise ConfigurationRefused for a node that can't hold a class."""
    for node in nodes if durability != NODE else ():
        with runtime.connection(node) as connection:
            refuse_server(connection, node, durability)


class DurableTopic(NamedTuple):
    """`unfit`: nodes that can't hold its class, with reasons."""

    topic: str
    durability: Durability
    nodes: frozenset[NodeId]
    unfit: Mapping[NodeId, str]


def durable_topics(runtime: Runtime) -> dict[str, DurableTopic]:
    """Return topics with a class other than `node`, by name."""
    with runtime.control.connection() as connection:
        rows = connection.execute(query("durable_topics")).fetchall()
        nodes = [node for node in nodes_by(connection) if node.takes_partitions] if rows else []
    unfit = {one: _unfit(runtime, nodes, one) for one in {row[1] for row in rows}}
    return {
        topic: DurableTopic(topic, durability, frozenset(map(NodeId, places)), unfit[durability])
        for topic, durability, places in rows
    }


def unfit_nodes(topics: Mapping[str, DurableTopic], topic: str) -> frozenset[NodeId]:
    """Return nodes that can't hold its class."""
    return frozenset(topics[topic].unfit) if topic in topics else frozenset()


def _unfit(runtime: Runtime, nodes: Iterable[Node], durability: Durability) -> Mapping[NodeId, str]:
    found: dict[NodeId, str] = {}
    for node in nodes:
        try:
            with runtime.connection(node, within_s=ANSWER_WITHIN_S) as connection:
                refuse_server(connection, node, durability)
        except MqlayerError as error:
            found[node.node_id] = str(error)
    return found


def set_node_replicas(runtime: Runtime, name: str, replicas: int) -> bool:
    """Say how many replicas a node's Redis has; return whether that changed. Audited.

    Raises NotFound, InvalidInput, and Conflict where a topic's class needs one.
    """
    check_name("node", name)
    if not 0 <= replicas <= REPLICAS_LIMIT:
        raise InvalidInput(f"a node has 0 to {REPLICAS_LIMIT} replicas")
    node = _find(runtime, name)
    if node.replicas == replicas:
        return False

    def work(connection: Connection) -> None:
        topics = connection.execute(query("durable_topics")).fetchall()
        held = [topic for topic, durability, nodes in topics if node.node_id in nodes and durability != "disk"]
        if held and not replicas:
            raise Conflict(
                f"topics on node {name!r} wait for a replica: {', '.join(held[:5])}",
                "give them another class first: mqlayer topic set TOPIC --durability node",
            )
        connection.execute(query("node_replicas_put"), {"node_id": node.node_id, "replicas": replicas})
        write_audit(connection, runtime.actor, "node replicas", name, {"replicas": replicas, "before": node.replicas})

    runtime.control.transaction(work)
    return True


def _find(runtime: Runtime, name: str) -> Node:
    for node in load_nodes(runtime.control):
        if node.name == name:
            return node
    raise NotFound("node", name, "register it: mqlayer node register NAME URL")
