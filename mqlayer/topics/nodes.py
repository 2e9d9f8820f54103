"""Register, address and arm Redis nodes: `docs/design/arming-nodes.md`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from mqlayer.domain.names import check_name, check_zone
from mqlayer.domain.node_runs import is_armed_shard, is_former, is_same_run, is_unchanged
from mqlayer.domain.routing import NodeId
from mqlayer.errors import AccessDenied, Conflict, NodeNotArmed, NotFound, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redis.acl_check import RequiredAccess
from mqlayer.redis.addresses import display_url, is_cluster_url, parse_address, refuse_secrets
from mqlayer.redis.cluster_connection import ClusterConnection
from mqlayer.redis.node_connection import Node, NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import fence_command
from mqlayer.redis.roles import RedisRole
from mqlayer.redis.server_info import check_access
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.node_identity import refuse_armed_server, refuse_known_server, refuse_partitions
from mqlayer.topics.node_repair import NodeRepair
from mqlayer.topics.partition_creation import put_ended_sources

log = event_logger(__name__)

TRIES: Final = 5
Lowered = Mapping[int, int]
"""Per partition, the offset of the lowered positions."""
TIMEOUTS: Final = {"lock_wait": "10s", "idle": "30s"}
"""A stopped process must not block others."""


def register_node(runtime: Runtime, *, name: str, url: str, zone: str = "") -> Node:
    """Register a Redis as a node and arm its current run. Idempotent for the same name and URL; see `set_node_zone`.

    Checks that this process's Redis user may arm, on keys of this prefix. Raises ConfigurationRefused for unsafe server
    settings, Conflict for a name with another URL or zone and for a Redis of another node, InvalidInput for a URL with
    a user or password.
    """
    check_name("node", name)
    check_zone(zone)
    candidate = _candidate(name, url)
    with runtime.connection(candidate, RedisRole.ARMING, any_run=True) as node_connection:
        run_id = node_connection.connect().run_id
        if all(node.name != name for node in list_nodes(runtime.control)):
            refuse_partitions(runtime, node_connection)

    facts = {"name": name, "url": url, "zone": zone, "run_id": run_id}

    def work(connection: Connection) -> None:
        new = connection.execute(query("node_insert"), facts).fetchone()
        if new is not None:
            connection.execute(query("nodes_lock"))
            refuse_known_server(connection, candidate, run_id)
            write_audit(connection, runtime.actor, "node register", name, {"url": display_url(url)})

    runtime.control.transaction(work)
    node = find_node(runtime.control, name)
    if node.url != url:
        raise Conflict(
            f"node {name!r} is registered as {node.address}",
            f"choose another name for another Redis; where it replaces that one, say mqlayer node set {name} --url URL",
        )
    if zone and node.zone != zone:
        raise Conflict(
            f"node {name!r} is registered {f'in zone {node.zone}' if node.zone else 'without a zone'}",
            f"change that: mqlayer node set {name} --zone {zone}",
        )
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
    runtime: Runtime,
    name: str,
    *,
    accept_loss: bool = False,
    accept_loss_of: frozenset[int] = frozenset(),
    empty: bool = False,
    former: bool = False,
) -> tuple[Node, int]:
    """Arm a node that restarted or lost data; return it and the number of raised epochs.

    Idempotent; a crash leaves the node unarmed. Acks under earlier epochs are refused.

    Only an application database can resend. `accept_loss`: continue without messages that it lacks;
    `accept_loss_of`: for these partitions only. `empty`: the node's data are lost; partitions under
    another prefix belong to another system. `former`: accept a replaced primary.

    Raises ConfigurationRefused for another key prefix, StoreUnavailable if another outbox's relay must resend, Conflict
    for unaccepted loss and for another node's Redis, NodeNotArmed for a replaced primary.
    """
    options: dict[str, Any] = {"accept_loss": accept_loss, "accept_loss_of": accept_loss_of, "empty": empty}

    def work(connection: Connection, lowered: Lowered) -> int | Lowered:
        node, formers = _locked(connection, name)
        arming = _NodeArming(runtime, connection, node, formers, former=former, lowered=lowered)
        return arming.run(options, act="node rearm", facts={}, always=False)

    epochs = _arm(runtime.control, name, work)
    return find_node(runtime.control, name), epochs


def arm_if_allowed(runtime: Runtime, name: str) -> Node:
    """Arm a node if this process's Redis user may, else leave it to a worker.

    Raises as `rearm_node`, except AccessDenied.
    """
    node = find_node(runtime.control, name)
    try:
        check_access(node, RequiredAccess(RedisRole.ARMING, runtime.prefix, node.is_cluster))
        return rearm_node(runtime, name)[0]
    except AccessDenied as error:
        log.warning("node_not_armed", extra={"node": name, "reason": f"{error}; it is left to a worker"})
        return find_node(runtime.control, name)


def set_node_address(
    runtime: Runtime, name: str, url: str, *, empty: bool = False, accept_loss: bool = False, former: bool = False
) -> tuple[Node, int]:
    """Change a node's address and arm the server there, in one transaction; return as `rearm_node`.

    Processes follow within seconds; earlier owners are refused before the new server serves. Raises as `rearm_node`,
    and Conflict if the Redis holds none of the node's partitions, unless `empty` accepts their loss.
    """
    parse_address(url)
    refuse_secrets(url)
    options: dict[str, Any] = {"accept_loss": accept_loss, "empty": empty}

    def work(connection: Connection, lowered: Lowered) -> int | Lowered:
        node, formers = _locked(connection, name)
        if node.is_cluster is not is_cluster_url(url):
            raise Conflict(
                f"node {name!r} is {'a cluster' if node.is_cluster else 'no cluster'}, unlike {display_url(url)}",
                "register it as a node of its own, and drain this one",
            )
        if node.url == url:
            arming = _NodeArming(runtime, connection, node, formers, former=former, lowered=lowered)
            return arming.run(options, act="node rearm", facts={}, always=False)
        facts = {"from": display_url(node.url), "to": display_url(url)}
        there = replace(node, url=url)
        arming = _NodeArming(runtime, connection, there, formers, former=former, empty=empty, lowered=lowered)
        epochs = arming.run(options, act="node set", facts=facts, always=True)
        if isinstance(epochs, int):
            connection.execute(query("node_address_put"), {"node_id": node.node_id, "url": url})
        return epochs

    epochs = _arm(runtime.control, name, work)
    return find_node(runtime.control, name), epochs


def _arm(database: Database, name: str, work: Callable[[Connection, Lowered], int | Lowered]) -> int:
    lowered: Lowered = {}
    for _ in range(TRIES):
        came_to = database.transaction(lambda connection: work(connection, lowered))  # noqa: B023
        if isinstance(came_to, int):
            return came_to
        lowered = came_to
    raise StoreUnavailable(f"node {name}", "it loses its partitions again and again while it is armed")


def _locked(connection: Connection, name: str) -> tuple[Node, list[str]]:
    connection.execute(query("transaction_patience"), TIMEOUTS)
    row = connection.execute(query("node_lock"), {"name": name}).fetchone()
    if row is None:
        raise NotFound("node", name, "register it: mqlayer node register NAME URL")
    *facts, formers = row
    return Node(*facts), formers


class _NodeArming:
    """`empty`: the server may lack all partitions. `lowered`: offsets of an earlier transaction."""

    def __init__(
        self,
        runtime: Runtime,
        connection: Connection,
        node: Node,
        formers: list[str],
        *,
        former: bool,
        lowered: Lowered,
        empty: bool = True,
    ) -> None:
        self._runtime, self._connection, self._node, self._formers = runtime, connection, node, formers
        self._former, self._empty, self._lowered = former, empty, lowered

    def run(self, options: dict[str, Any], *, act: str, facts: dict[str, Any], always: bool) -> int | Lowered:
        """Arm if needed, or `always`; return the number of raised epochs.

        Returns offsets after only lowering positions: commit, repeat.
        """
        node, connection = self._node, self._connection
        with self._runtime.connection(node, RedisRole.ARMING, any_run=True) as node_connection:
            run_id = node_connection.connect().run_id
            self._refuse(run_id, node_connection)
            refuse_armed_server(connection, node, run_id)
            repair = NodeRepair(self._runtime, connection, node_connection, **options)
            if not self._empty and repair.state.is_empty:
                raise Conflict(
                    f"{node.address} holds none of the partitions of node {node.name!r}",
                    "look at the address; say --empty if the node's data are gone and it begins anew there",
                )
            is_armed = is_same_run(run_id, node.armed_run_id)
            if not always and not repair.needed and is_armed:
                return 0
            emptied = repair.state.is_emptied and is_armed
            if emptied or (repair.state.needs_restore and self._is_shorter(repair.state.offsets)):
                repair.lower()
                if emptied:
                    # A crash from here on must not leave an incomplete run armed.
                    connection.execute(query("node_disarm"), {"node_id": node.node_id})
                return repair.state.offsets
            if not is_armed:
                self._renew_file(node_connection)
            facts_of_raise = {"node_id": node.node_id, "partitions": self._touched(node_connection, repair)}
            raised = connection.execute(query("node_epochs_raise"), facts_of_raise).fetchall()
            failpoint("rearm.before_fence")
            partitions = [desired.partition for desired in repair.state.desired]
            self._put_numbers(node_connection, raised, partitions)
            failpoint("rearm.before_remake")
            repair.repair(raised)
            # A server emptied meanwhile has forgotten them and would accept stale epochs.
            self._put_numbers(node_connection, raised, partitions)
            repair.state.recheck()
            failpoint("rearm.before_arm")
        # Another node may have been armed with this Redis meanwhile.
        connection.execute(query("nodes_lock"))
        refuse_armed_server(connection, node, run_id)
        connection.execute(query("node_arm"), {"node_id": node.node_id, "run_id": run_id})
        facts = facts | {"run_id": run_id, "epochs": len(raised)} | repair.report.facts()
        write_audit(connection, self._runtime.actor, act, node.name, facts)
        log.warning("node_rearmed", extra={"node": node.name} | facts)
        return len(raised)

    def _is_shorter(self, offsets: Lowered) -> bool:
        return any(offset < self._lowered.get(partition, offset + 1) for partition, offset in offsets.items())

    def _refuse(self, run_id: str, connection: NodeConnection) -> None:
        node = self._node
        if self._former or not is_former(run_id, armed=node.armed_run_id, former=self._formers):
            return
        if not self._is_shard_again(connection):
            raise NodeNotArmed(
                node.address,
                f"its run {run_id[:8]} is an old primary of node {node.name!r} and another primary took its place: "
                f"stop it, or let the address lead to that one; mqlayer node rearm {node.name} --former "
                "takes it back, and accepts the messages that it lacks",
            )

    def _is_shard_again(self, connection: NodeConnection) -> bool:
        """Whether a former shard has slots again."""
        # Armed ones say so. It gave all of them away, and was no replica since: else it would be another run.
        if not isinstance(connection, ClusterConnection):
            return False
        armed = self._node.armed_run_id
        return connection.is_told_by([n for n, run in connection.shard_runs().items() if is_armed_shard(run, armed)])

    def _renew_file(self, connection: NodeConnection) -> None:
        """Rewrite the append-only file: a restart would run the torn start of a transaction."""
        (reply,) = connection.call([("BGREWRITEAOF",)])
        if isinstance(reply, Exception):
            log.warning("node_file_not_rewritten", extra={"node": self._node.name, "reason": str(reply)})

    def _touched(self, connection: NodeConnection, repair: NodeRepair) -> list[int] | None:
        """Return a cluster's partitions whose owners must begin again; None: all.

        Not those of a shard that is armed, with the slots that it had then.
        """
        if not isinstance(connection, ClusterConnection) or self._node.armed_run_id is None:
            return None
        armed = self._node.armed_run_id
        kept = {number for number, run in connection.shard_runs().items() if is_unchanged(run, armed)}
        rows = self._connection.execute(query("cluster_partitions"), {"node_id": self._node.node_id}).fetchall()
        wrong = {desired.partition for desired in repair.state.desired if not repair.state.is_right(desired)}
        return [row[0] for row in rows if row[0] in wrong or connection.shard_of(row[0]) not in kept]

    def _put_numbers(
        self, connection: NodeConnection, raised: Sequence[tuple[int, int, int]], partitions: Sequence[int]
    ) -> None:
        prefix = self._runtime.prefix
        put_ended_sources(self._connection, connection, prefix, partitions)
        commands = [fence_command(connection, prefix, partition, group, epoch) for group, partition, epoch in raised]
        for reply in connection.call(commands):
            raise_for_reply(reply, self._node.address)


def _candidate(name: str, url: str) -> Node:
    parse_address(url)
    refuse_secrets(url)
    return Node(NodeId(0), name, url, None)
