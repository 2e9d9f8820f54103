"""Give up a lost node, or arm nodes that came back (docs/design/route-changes.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mqlayer.domain.route_changes import emptiest, plan_move
from mqlayer.domain.routing import NodeId
from mqlayer.errors import Conflict, MqlayerError, NodeNotArmed, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.postgres.server_identity import meet_server
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Node, raise_for_reply
from mqlayer.routes.change_driver import finish_changes
from mqlayer.routes.planner import apply_change, choose_node
from mqlayer.runtime.route_cache import load_nodes, load_route
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.durability import DurableTopic, durable_topics, unfit_nodes
from mqlayer.topics.nodes import find_node, rearm_node

log = event_logger(__name__)

ANSWER_WITHIN_S = 3.0


@dataclass(frozen=True, slots=True)
class NodeLossReport:
    """The loss of a node. `resent`: messages sent again elsewhere.

    `only_on_node`: messages no longer in the outbox; groups that had not settled them lose them. `direct`: direct
    producers may have published there, with the same loss.
    """

    moved: tuple[int, ...]
    recreated: tuple[int, ...]
    resent: int
    only_on_node: int
    direct: bool


def give_up_node(runtime: Runtime, name: str) -> NodeLossReport:
    """Move everything off a node that never comes back; return and audit the loss.

    Raises Conflict if the node answers, or no other one holds a topic's durability class; NotFound without another
    armed node. After a crash or delay, repeat it.
    """
    node = find_node(runtime.control, name)
    return _NodeRemoval(runtime, node, refuse_class_loss(runtime, node)).run()


def refuse_class_loss(runtime: Runtime, node: Node) -> Mapping[str, DurableTopic]:
    """Return topics with a class. Raises Conflict where no other node holds one."""
    topics = durable_topics(runtime)
    others = {other.node_id for other in load_nodes(runtime.control) if other.takes_partitions} - {node.node_id}
    for one in topics.values():
        if node.node_id in one.nodes and others and others <= set(one.unfit):
            reason = one.unfit[min(others)]
            raise Conflict(
                f"no other node can hold durability {one.durability} of topic {one.topic!r} ({reason})",
                f"let one hold it, or give the class up: mqlayer topic set {one.topic} --durability node; then again",
            )
    return topics


@dataclass(frozen=True, slots=True)
class _NodeRemoval:
    runtime: Runtime
    node: Node
    durable: Mapping[str, DurableTopic]

    def run(self) -> NodeLossReport:
        self._refuse_if_it_answers()
        since = self.runtime.control.transaction(self._take_out_of_service)
        failpoint("lost.after_disarm")
        # Partitions without publishers first: open changes wait for them.
        for partition, topic_id, topic, state in self._partitions():
            if state != "open":
                self._relocate(partition, topic_id, topic)
                failpoint("lost.after_one")
        self._recreate(since)
        finish_changes(self.runtime)
        for partition, _, topic, state in self._partitions():
            if state == "open":
                self._move(partition, topic)
                failpoint("lost.after_one")
        loss = self._loss(since)
        self.runtime.control.transaction(
            lambda c: write_audit(c, self.runtime.actor, "node lost", self.node.name, asdict(loss))
        )
        log.warning("node_given_up", extra={"node": self.node.name} | asdict(loss))
        return loss

    def _refuse_if_it_answers(self) -> None:
        node = self.node
        connection = self.runtime.connection(node, any_run=True, within_s=ANSWER_WITHIN_S)
        try:
            connection.connect()
        except StoreUnavailable:
            return
        finally:
            connection.close()
        raise Conflict(
            f"node {node.name!r} at {node.address} answers", f"bring it back: mqlayer node rearm {node.name}"
        )

    def _take_out_of_service(self, connection: Connection) -> Any:
        # Lock changes before nodes, as change drivers do.
        connection.execute(query("changes_of_lost_node"), {"node_id": self.node.node_id})
        row = connection.execute(query("node_lost"), {"node_id": self.node.node_id}).fetchone()
        write_audit(connection, self.runtime.actor, "node out of service", self.node.name, {})
        return row and row[0]

    def _partitions(self) -> list[tuple[int, int, str, str]]:
        with self.runtime.control.connection() as connection:
            facts = {"node_id": self.node.node_id}
            return [tuple(row) for row in connection.execute(query("partitions_of_lost_node"), facts).fetchall()]

    def _move(self, partition: int, topic: str) -> None:
        route = load_route(self.runtime.control, topic)
        target = choose_node(self.runtime.control, route, partition, unfit=unfit_nodes(self.durable, topic))
        plan = plan_move(route, partition, target, mode="lost")
        apply_change(self.runtime, plan)

    def _relocate(self, partition: int, topic_id: int, topic: str) -> None:
        """Assign a partition without publishers to another node; `_recreate` fills it."""
        self._refuse_if_it_answers()
        facts: dict[str, Any] = {"partition_id": partition, "to_node_id": self._emptiest(topic_id, topic)}
        # Its dead messages may come again at other offsets.
        facts |= {"partitions": [partition], "offsets": [1]}
        names = ("abandoned_put", "abandoned_remove", "partition_relocate", "group_starts_reset",
                 "archive_progress_reset", "assignments_of_partition_raise", "dead_log_lost")  # fmt: skip

        def work(connection: Connection) -> None:
            for name in names:
                done = connection.execute(query(name), facts)
                if name == "partition_relocate" and done.rowcount != 1:
                    raise Conflict(
                        "a node began to drain meanwhile", f"again: mqlayer node lost {self.node.name} --yes"
                    )

        self.runtime.control.transaction(work)

    def _recreate(self, since: Any) -> None:
        recreated = self._recreated(since)
        with self.runtime.control.connection() as connection:
            rows = connection.execute(query("nodes_of_partitions"), {"partitions": list(recreated)}).fetchall()
        for (name,) in rows:
            rearm_node(self.runtime, name, accept_loss_of=frozenset(recreated))

    def _emptiest(self, topic_id: int, topic: str) -> NodeId:
        unfit = unfit_nodes(self.durable, topic) | {self.node.node_id}
        nodes = [node.node_id for node in load_nodes(self.runtime.control) if node.takes_partitions]
        nodes = [node for node in nodes if node not in unfit] or nodes
        with self.runtime.control.connection() as connection:
            rows = connection.execute(query("partition_list"), {"topic_id": topic_id}).fetchall()
        return emptiest(nodes, (row[1] for row in rows), other_than=self.node.node_id)

    def _recreated(self, since: Any) -> tuple[int, ...]:
        facts = {"node_id": self.node.node_id, "since": since}
        with self.runtime.control.connection() as connection:
            return tuple(row[0] for row in connection.execute(query("abandoned_of_node"), facts).fetchall())

    def _loss(self, since: Any) -> NodeLossReport:
        facts = {"node_id": self.node.node_id, "since": since}
        with self.runtime.control.connection() as connection:
            given_up = [row[0] for row in connection.execute(query("given_up"), facts).fetchall()]
            direct = connection.execute(query("direct_sources_live")).fetchone()
        moved = tuple(fact["partition"] for fact in given_up)
        resent, only_on_node = (sum(fact[name] for fact in given_up) for name in ("resent", "only_on_node"))
        return NodeLossReport(moved, self._recreated(since), resent, only_on_node, bool(direct and direct[0]))


def rearm_lost_nodes(runtime: Runtime) -> dict[str, str]:
    """Arm returned nodes; return "armed" or the reason why not, by name.

    These restarted or were emptied without a user, or must seal a partition moved away from them. Given-up nodes only
    in the second case.
    """
    with runtime.control.connection() as connection:
        # A pooler may keep our connections over a fail-over.
        meet_server(connection)
        sealing = [row[0] for row in connection.execute(query("seals_unreachable")).fetchall()]
        given_up = {row[0] for row in connection.execute(query("nodes_given_up")).fetchall()}
        places: dict[int, list[int]] = {}
        for partition, node_id, *_ in connection.execute(query("partition_places")).fetchall():
            places.setdefault(node_id, []).append(partition)
    restarted = [
        node.name
        for node in load_nodes(runtime.control)
        if node.name not in given_up
        and node.name not in sealing
        and _needs_arming(runtime, node, places.get(node.node_id, []))
    ]
    came_to: dict[str, str] = {}
    worker = replace(runtime, actor="worker")
    for name in sealing + restarted:
        try:
            rearm_node(worker, name)
            came_to[name] = "armed"
        except MqlayerError as error:
            came_to[name] = str(error)
            log.warning("node_not_rearmed", extra={"node": name, "reason": str(error)})
    return came_to


def _needs_arming(runtime: Runtime, node: Node, partitions: list[int]) -> bool:
    """FLUSHALL keeps the run, so partitions are checked too."""
    try:
        with runtime.connection(node, within_s=ANSWER_WITHIN_S) as connection:
            connection.connect()
            states = connection.call(
                [("HGET", partition_keys(runtime.prefix, partition).meta, "state") for partition in partitions]
            )
            return any(raise_for_reply(state, node.address) in (None, b"importing") for state in states)
    except NodeNotArmed:
        return True
    except MqlayerError:
        return False
