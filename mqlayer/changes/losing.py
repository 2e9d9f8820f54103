"""An operator's word that a node is lost for good: go on without it, and say what that loses.

For each partition that publishers use a change moves it to another node, with what the outbox still holds sent again;
sealed ones that some group has not drained are made anew elsewhere, from the outbox. Each step is one of the changes or
one transaction, so the command can be given again after a crash at any line.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

from mqlayer.changes.changing import apply_change, choose_node
from mqlayer.changes.proving import prove
from mqlayer.changes.steps import finish_changes
from mqlayer.domain.changes import plan_move
from mqlayer.domain.routing import NodeId
from mqlayer.errors import Conflict, MqlayerError, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redis.nodes import Node, NodeConnection
from mqlayer.routes.cache import load_nodes, load_route
from mqlayer.topics.nodes import find_node, note, rearm_node

log = logging.getLogger(__name__)

ANSWER_WITHIN_S = 3.0


@dataclass(frozen=True, slots=True)
class Loss:
    """What a lost node held. `again`: messages sent once more to where its partitions are now.

    `only_there`: messages that the outbox does not hold any more; what a group had not settled of them is lost to it.
    `direct`: whether direct producers may have published there: what groups had not settled of that is lost too.
    """

    moved: tuple[int, ...]
    remade: tuple[int, ...]
    again: int
    only_there: int
    direct: bool


def give_up_node(
    database: Database, name: str, *, prefix: str, application: Database, actor: str = "api", unsafe: bool = False
) -> Loss:
    """Move everything off a node that never comes back; return what that loses. Written into the audit log.

    Raises Conflict where the node answers, NotFound where no other node is there.
    """
    node = find_node(database, name)
    _refuse_if_it_answers(node, unsafe=unsafe)
    _take_out_of_service(database, node, actor)
    failpoint("lost.after_disarm")
    finish_changes(database, prefix=prefix, application=application, unsafe=unsafe)
    moved: list[int] = []
    remade: list[int] = []
    again = only_there = 0
    for partition, topic, state in _partitions(database, node.node_id):
        route = load_route(database, topic)
        target = choose_node(database, route, partition, other_than=node.node_id)
        if state == "open":
            r = next(r for r in route.ranges if r.partition == partition)
            with database.connection() as connection:
                proof = prove(connection, application, route.topic_id, r.lp_from, r.lp_to, "lost")
            again, only_there = again + proof.again, only_there + proof.only_there
            plan = plan_move(route, partition, target, mode="lost")
            apply_change(database, plan, prefix=prefix, application=application, actor=actor, unsafe=unsafe)
            moved.append(partition)
        else:
            _relocate(database, partition, target)
            remade.append(partition)
        failpoint("lost.after_one")
    for other in load_nodes(database):
        if remade and other.node_id != node.node_id:
            rearm_node(
                database,
                other.name,
                prefix=prefix,
                application=application,
                accept_loss=True,
                actor=actor,
                unsafe=unsafe,
            )
    with database.connection() as connection:
        row = connection.execute(query("direct_sources_live")).fetchone()
    loss = Loss(tuple(moved), tuple(remade), again, only_there, bool(row and row[0]))
    database.transaction(lambda connection: note(connection, actor, "node lost", name, asdict(loss)))
    log.warning("node_given_up", extra={"node": name} | asdict(loss))
    return loss


def bring_back_nodes(
    database: Database, *, prefix: str, application: Database | None = None, unsafe: bool = False
) -> dict[str, str]:
    """Arm nodes that have to seal a partition which was moved off them while they were away; say why where not."""
    with database.connection() as connection:
        names = [row[0] for row in connection.execute(query("seals_away")).fetchall()]
    came_to: dict[str, str] = {}
    for name in names:
        try:
            rearm_node(database, name, prefix=prefix, application=application, actor="worker", unsafe=unsafe)
            came_to[name] = "armed"
        except MqlayerError as error:
            came_to[name] = str(error)
    return came_to


def _refuse_if_it_answers(node: Node, *, unsafe: bool) -> None:
    line = NodeConnection(
        node, any_run=True, unsafe=unsafe, connect_timeout_s=ANSWER_WITHIN_S, timeout_s=ANSWER_WITHIN_S
    )
    try:
        line.connect()
    except StoreUnavailable:
        return
    finally:
        line.close()
    raise Conflict(f"node {node.name!r} at {node.address} answers", f"bring it back: mqlayer node rearm {node.name}")


def _take_out_of_service(database: Database, node: Node, actor: str) -> None:
    def work(connection: Connection) -> None:
        connection.execute(query("node_disarm"), {"node_id": node.node_id})
        connection.execute(query("changes_of_lost_node"), {"node_id": node.node_id})
        note(connection, actor, "node out of service", node.name, {})

    database.transaction(work)


def _partitions(database: Database, node_id: NodeId) -> list[tuple[int, str, str]]:
    with database.connection() as connection:
        rows = connection.execute(query("partitions_of_lost_node"), {"node_id": node_id}).fetchall()
    return [(row[0], row[1], row[2]) for row in rows]


def _relocate(database: Database, partition: int, to: NodeId) -> None:
    """Have a partition that nobody publishes to made anew on another node."""

    def work(connection: Connection) -> None:
        facts = {"partition_id": partition, "to_node_id": to}
        for name in ("partition_relocate", "group_starts_reset", "assignments_of_partition_raise"):
            connection.execute(query(name), facts)

    database.transaction(work)
