"""Drives route changes: planned, sealing, sealed, done. Any process may continue one.

Steps, guards and crashes: docs/design/route-changes.md.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final

from psycopg.types.json import Jsonb
from tenacity import Retrying, retry_if_exception_type, stop_after_delay

from mqlayer.domain.durability import Durability
from mqlayer.domain.route_changes import ChangeMode, marks_within
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.errors import Conflict, MqlayerError, NodeNotArmed, NotFound, StoreUnavailable, TransactionConflict
from mqlayer.failpoints import failpoint
from mqlayer.groups.lineage import raise_group_versions
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.randomness import FullJitter
from mqlayer.redis.durability import refuse_unheld
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Node, NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import Refused, Sealed, create, open_partition, seal_command, seal_reply
from mqlayer.routes.dedup_handover import hand_over_ids
from mqlayer.routes.outbox_proof import prove, refuse_unproven, retain_unproven
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.route_cache import nodes_by
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.nodes import rearm_node
from mqlayer.topics.partition_creation import put_ended_sources

log = event_logger(__name__)

TIMEOUTS: Final = {"lock_wait": "10s", "idle": "30s"}
"""A stopped driver must not block others."""
RETRY_FOR_S: Final = 5.0
"""How long a step is retried while a node is not armed."""


@dataclass(frozen=True, slots=True)
class ChangePartition:
    """A partition of a change."""

    partition: PartitionId
    node: NodeId
    lp_from: int
    lp_to: int


@dataclass(frozen=True, slots=True)
class LockedChange:
    """A change whose row this transaction holds."""

    change_id: int
    topic_id: int
    topic: str
    version: int
    kind: str
    state: str
    mode: ChangeMode
    durability: Durability
    parents: tuple[ChangePartition, ...]
    successors: tuple[ChangePartition, ...]


class ChangeDriver:
    """Finishes changes. Keeps connections to nodes: close it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._prefix = runtime, runtime.prefix
        self._nodes: dict[NodeId, Node] = {}
        self._connections = NodePool(runtime, self._node)
        self._emptied = ""

    def finish(self, change_id: int) -> str:
        """Take all remaining steps; return the final state, done or dropped.

        Raises StoreUnavailable (the change keeps its state), Conflict if Redis contradicts Postgres or another process
        holds the change.
        """
        retrying = Retrying(
            retry=retry_if_exception_type(NodeNotArmed),
            wait=FullJitter(multiplier=0.05, max=0.5),
            stop=stop_after_delay(RETRY_FOR_S),
            reraise=True,
        )
        retrying(self._run, self._begin, change_id)
        retrying(self._run, self._seal, change_id)
        state: str = retrying(self._run, self._open, change_id)
        return state

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()

    def _run(self, step: Callable[[Connection, LockedChange], str], change_id: int) -> str:
        def change(connection: Connection) -> str:
            locked_now = locked(connection, change_id)
            nodes = {node.node_id: node for node in nodes_by(connection)}
            if nodes != self._nodes:
                # Connections to an earlier run or address would refuse their next use.
                self.close()
            self._nodes = nodes
            return step(connection, locked_now)

        try:
            return self._runtime.control.transaction(change)
        except NodeNotArmed:
            self.close()
            self._arm_emptied()
            raise
        except TransactionConflict as error:
            raise Conflict(
                f"change {change_id} is held by another process", "it goes on; if it dies: mqlayer route repair"
            ) from error

    def _arm_emptied(self) -> None:
        """FLUSHALL keeps the armed run, so no other process may notice."""
        name, self._emptied = self._emptied, ""
        if name:
            rearm_node(replace(self._runtime, actor="driver"), name)

    def _begin(self, connection: Connection, change: LockedChange) -> str:
        if change.state != "planned":
            return change.state
        for part in change.successors:
            self._make(connection, change, part)
            failpoint("change.after_make")
        if change.mode == "live":
            # An unavailable parent must not leave the others sealed.
            for part in change.parents:
                self.node_connection(part.node).call([("PING",)])
                self._refuse_unheld(change, part)
        connection.execute(query("change_sealing"), {"change_id": change.change_id})
        failpoint("change.before_sealing_commit")
        return "sealing"

    def _seal(self, connection: Connection, change: LockedChange) -> str:
        if change.state != "sealing":
            return change.state
        seals: dict[ChangePartition, Sealed] = {}
        for part in change.parents:
            if not self._is_unreachable(change, part):
                seals[part] = self._seal_one(change, part)
                failpoint("change.after_seal")
        for part in seals:
            self._refuse_unheld(change, part)
        # Lock before reading back: arming waits from here on, so a seal that is read stays, or the run changes.
        self._still_armed(connection, list(seals))
        for part, sealed in seals.items():
            self._read_back(part, sealed)
        for part, sealed in seals.items():
            self._record(connection, change, part, sealed)
        for part in change.parents:
            if part not in seals:
                self._record_proof(connection, change, part)
        connection.execute(query("change_sealed"), {"change_id": change.change_id})
        failpoint("change.before_sealed_commit")
        return "sealed"

    def _open(self, connection: Connection, change: LockedChange) -> str:
        if change.state != "sealed":
            return change.state
        change_facts = {"change_id": change.change_id}
        marks = [row[0] for row in connection.execute(query("seal_marks_of"), change_facts)]
        for part in change.successors:
            self._hand_over_ids(change, part)
        # An opening on a run that is no longer armed would not count. Arming waits from here on.
        self._still_armed(connection, change.successors)
        for part in change.successors:
            self._open_one(change, part, marks_within(marks, part.lp_from, part.lp_to))
            failpoint("change.after_open")
        opened_at = connection.execute(query("clock")).fetchone()
        version = {"topic_id": change.topic_id, "version": change.version}
        connection.execute(query("topic_lock"), {"name": change.topic})
        connection.execute(query("route_insert_next"), version | change_facts)
        connection.execute(query("change_partitions_settle"), change_facts | {"mode": change.mode})
        raised = connection.execute(query("topic_version_raise"), version | {"version": change.version - 1})
        if raised.rowcount != 1:
            raise Conflict(f"topic {change.topic!r} is not at version {change.version - 1} any more")
        connection.execute(query("change_done"), change_facts | {"opened_at": opened_at and opened_at[0]})
        connection.execute(query("change_notify"), {"topic_id": change.topic_id})
        failpoint("change.before_done_commit")
        facts = {"topic": change.topic, "kind": change.kind, "version": change.version, "change": change.change_id}
        log.info("route_changed", extra=facts)
        return "done"

    def _make(self, control: Connection, change: LockedChange, part: ChangePartition) -> None:
        connection = self.node_connection(part.node)
        if connection.is_cluster:
            put_ended_sources(control, connection, self._prefix, [part.partition])
        word = create(
            connection,
            self._prefix,
            part.partition,
            change.topic,
            part.lp_from,
            part.lp_to,
            "importing",
            change.change_id,
        )
        if word == "conflict":
            raise Conflict(
                f"partition {part.partition} exists on {connection.node.address} otherwise than planned",
                "this Redis holds data of another control database: use another MQLAYER_KEY_PREFIX",
            )

    def _seal_one(self, change: LockedChange, part: ChangePartition) -> Sealed:
        connection = self.node_connection(part.node)
        command = seal_command(connection, self._prefix, part.partition, change.change_id, str(uuid.uuid4()))
        answer = seal_reply(connection.call([command])[0], connection.node.address)
        if isinstance(answer, Sealed):
            return answer
        if answer.status == "absent":
            self._emptied = connection.node.name
        raise _not_sealed(change, part, answer, connection.node.address)

    def _refuse_unheld(self, change: LockedChange, part: ChangePartition) -> None:
        """Wait for a live parent's durability class."""
        # A repetition is confirmed at the successor, which waits for its own node only.
        if change.mode == "live":
            refuse_unheld(
                self.node_connection(part.node),
                self._node(part.node),
                self._prefix,
                part.partition,
                topic=change.topic,
                durability=change.durability,
            )

    def _is_unreachable(self, change: LockedChange, part: ChangePartition) -> bool:
        if change.mode == "live":
            return False
        try:
            self.node_connection(part.node).connect()
        except NodeNotArmed:
            # It answers: arming restores it.
            raise
        except StoreUnavailable:
            return True
        return False

    def _record_proof(self, connection: Connection, change: LockedChange, part: ChangePartition) -> None:
        """Record an unreachable parent by its outbox's marks; its node seals it before it serves."""
        proof = prove(connection, self._runtime.application, change.topic_id, part.lp_from, part.lp_to, change.mode)
        if change.mode == "lost" and self._runtime.application is not None:
            # The outbox must keep the rows that are to be sent again.
            retain_unproven(self._runtime.application, change.topic_id, proof)
            given_up = {"partition": part.partition, "node": part.node} | proof.counts()
            write_audit(connection, "driver", "partition given up", change.topic, given_up)
        connection.execute(query("node_disarm"), {"node_id": part.node})
        facts = {
            "partition_id": part.partition,
            "change_id": change.change_id,
            "seal_id": uuid.uuid4(),
            "next_offset": 0,
            "run_id": "",
            "marks": Jsonb(proof.marks),
            "unreachable": True,
            "cut": False,
        }
        connection.execute(query("seal_put"), facts)
        # Its outbox may resend dead messages to the successors.
        connection.execute(query("dead_log_lost"), {"partitions": [part.partition], "offsets": [1]})

    def _read_back(self, part: ChangePartition, sealed: Sealed) -> None:
        """Check the command record in this run's stream (invariant 6)."""
        connection, keys = self.node_connection(part.node), partition_keys(self._prefix, part.partition)
        replies = connection.call([("HGET", keys.meta, "seal"), ("XREVRANGE", keys.log, "+", "-", "COUNT", 1)])
        seal, last = (raise_for_reply(reply, connection.node.address) for reply in replies)
        if seal != sealed.seal_id.encode() or not last or last[0][1][5] != seal:
            raise StoreUnavailable(
                connection.node.address, f"the seal of partition {part.partition} is not there any more"
            )

    def _still_armed(self, connection: Connection, parts: Sequence[ChangePartition]) -> None:
        """Raise NodeNotArmed unless the runs are armed; arming now waits."""
        wanted = {part.node: self.node_connection(part.node) for part in parts}
        rows = connection.execute(query("node_armed_runs"), {"node_ids": list(wanted)}).fetchall()
        for node_id, armed, given_up in rows:
            node_connection = wanted[NodeId(node_id)]
            if armed is None and not given_up:
                # Emptied, and the process that noticed died before arming it.
                self._emptied = node_connection.node.name
            if node_connection.connect().run_id != armed:
                raise NodeNotArmed(
                    node_connection.node.address, "it was not armed all the time while a partition on it was changed"
                )

    def _record(self, connection: Connection, change: LockedChange, part: ChangePartition, sealed: Sealed) -> None:
        facts = {
            "partition_id": part.partition,
            "change_id": change.change_id,
            "seal_id": sealed.seal_id,
            "next_offset": sealed.next_offset,
            "run_id": self.node_connection(part.node).connect().run_id,
            "marks": Jsonb(sealed.marks),
            "unreachable": False,
            "cut": False,
        }
        connection.execute(query("seal_put"), facts)

    def _hand_over_ids(self, change: LockedChange, part: ChangePartition) -> None:
        if change.mode != "live":
            return
        successor = (self.node_connection(part.node), part.partition)
        for parent in change.parents:
            if parent.lp_from < part.lp_to and part.lp_from < parent.lp_to:
                hand_over_ids(
                    (self.node_connection(parent.node), parent.partition),
                    successor,
                    prefix=self._prefix,
                    change=change.change_id,
                    lp_from=part.lp_from,
                    lp_to=part.lp_to,
                )
        failpoint("change.after_ids")

    def _open_one(self, change: LockedChange, part: ChangePartition, marks: Mapping[str, int]) -> None:
        connection = self.node_connection(part.node)
        word = open_partition(connection, self._prefix, part.partition, change.change_id, marks)
        if word == "absent":
            # It may have been open and consumed, so arming must recreate it, under new epochs.
            self._emptied = connection.node.name
            raise NodeNotArmed(connection.node.address, f"partition {part.partition} is gone from it: it lost data")
        if word != "open":
            raise Conflict(f"partition {part.partition} on {connection.node.address} can't be opened: {word}")

    def node_connection(self, node_id: NodeId) -> NodeConnection:
        """Return a node's connection, during a step. Raises NotFound."""
        return self._connections.to(node_id)

    def _node(self, node_id: NodeId) -> Node:
        node = self._nodes.get(node_id)
        if node is None:
            raise NotFound("node", node_id, "its row is gone from the control database")
        return node


def locked(connection: Connection, change_id: int) -> LockedChange:
    """Lock a change for a step. Raises NotFound."""
    connection.execute(query("transaction_patience"), TIMEOUTS)
    row = connection.execute(query("change_lock"), {"change_id": change_id}).fetchone()
    if row is None:
        raise NotFound("route change", change_id)
    parents: list[ChangePartition] = []
    successors: list[ChangePartition] = []
    for partition, node, lp_from, lp_to, is_parent in connection.execute(
        query("change_partitions"), {"change_id": change_id}
    ):
        (parents if is_parent else successors).append(
            ChangePartition(PartitionId(partition), NodeId(node), lp_from, lp_to)
        )
    number, topic_id, topic, version, kind, state, mode, durability = row
    return LockedChange(
        number, topic_id, topic, version, kind, state, mode, durability, tuple(parents), tuple(successors)
    )


def finish_change(runtime: Runtime, change_id: int) -> str:
    """Finish a change; raises as `ChangeDriver.finish`. Safe to call concurrently.

    The application database proves the marks of partitions on unreachable nodes.
    """
    with closing(ChangeDriver(runtime)) as driver:
        state = driver.finish(change_id)
    # After the commit: a stopped member that holds its group's lock must not keep publishers waiting.
    raise_group_versions(runtime.control)
    return state


def finish_changes(
    runtime: Runtime, *, topic: str | None = None, unreachable: bool = False, accept_loss: bool = False
) -> dict[int, str]:
    """Finish all open changes, or a topic's; return final states or reasons of delay by id.

    `unreachable`: go on without unreachable nodes; Conflict if direct producers may have published, unless
    `accept_loss`.
    """
    if unreachable and not accept_loss:
        refuse_unproven(runtime.control)
    with runtime.control.connection() as connection:
        open_ones = connection.execute(query("change_unfinished"), {"topic": topic}).fetchall()
        if unreachable:
            connection.execute(query("changes_without_nodes"), {"change_ids": [row[0] for row in open_ones]})
    came_to: dict[int, str] = {}
    for change_id, name in open_ones:
        try:
            came_to[change_id] = finish_change(runtime, change_id)
        except MqlayerError as error:
            came_to[change_id] = str(error)
            log.warning("route_change_delayed", extra={"topic": name, "change": change_id, "reason": str(error)})
    raise_group_versions(runtime.control)
    return came_to


def _not_sealed(change: LockedChange, part: ChangePartition, refused: Refused, address: str) -> MqlayerError:
    if refused.status == "absent":
        return NodeNotArmed(address, f"partition {part.partition} is gone from it: the node lost data")
    return Conflict(
        f"partition {part.partition} on {address} can't be sealed for change {change.change_id}: "
        f"{refused.status} {refused.fact}".rstrip()
    )
