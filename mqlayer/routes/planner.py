"""Plan and apply route changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from mqlayer.domain.durability import NODE
from mqlayer.domain.names import check_name
from mqlayer.domain.route_changes import ChangePlan, emptiest, halving_point, plan_merge, plan_move, plan_split
from mqlayer.domain.routing import NodeId, Route
from mqlayer.errors import Conflict, InvalidInput, NotFound, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.routes.change_driver import finish_change, finish_changes, locked
from mqlayer.routes.lp_load import measured_load
from mqlayer.routes.outbox_proof import refuse_unproven
from mqlayer.runtime.route_cache import load_nodes, load_route, node_names
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.durability import refuse_nodes
from mqlayer.topics.node_draining import draining_conflict, find_target

TIMEOUTS: Final = {"lock_wait": "10s", "idle": "5s"}
ChangeNote = Callable[[Connection, int], None]
"""Gets the change's id."""


def planned_split(
    runtime: Runtime,
    topic: str,
    partition: int,
    *,
    at: Sequence[int] = (),
    to: Sequence[str] = (),
    measure_s: float = 0.0,
    if_version: int | None = None,
) -> ChangePlan:
    """Plan to split a partition at the LPs `at`, or where its load halves; change nothing.

    `to`: one node, or one per successor; default its own. `measure_s`: seconds; 0: all history. Raises InvalidInput,
    NotFound, StoreUnavailable, Conflict if a change is open or the route version is not `if_version`.
    """
    route = _plannable(runtime.control, topic, if_version)
    points = list(at)
    if not points:
        loads = measured_load(runtime, route, partition, over_s=measure_s).per_lp
        r = next(r for r in route.ranges if r.partition == partition)
        points = [halving_point(loads, r.lp_from, r.lp_to)]
    elif measure_s:
        raise InvalidInput("a split is at the LPs named, or where the measured load is halved, not both")
    return plan_split(route, partition, points, [find_target(runtime.control, name).node_id for name in to])


def planned_merge(
    database: Database, topic: str, partitions: Sequence[int], *, to: str | None = None, if_version: int | None = None
) -> ChangePlan:
    """Plan to merge adjacent partitions onto `to` or the first one's node; raises as `planned_split`."""
    route = _plannable(database, topic, if_version)
    return plan_merge(route, partitions, None if to is None else find_target(database, to).node_id)


def planned_move(
    database: Database,
    topic: str,
    partition: int,
    *,
    to: str | None = None,
    unreachable: bool = False,
    accept_loss: bool = False,
    if_version: int | None = None,
) -> ChangePlan:
    """Plan to move a partition to `to` or the node with the fewest; raises as `planned_split`.

    `unreachable`: its node need not answer: the outbox proves the marks, consumers wait for the node. Conflict where
    direct producers may have published, unless `accept_loss`.
    """
    route = _plannable(database, topic, if_version)
    node = choose_node(database, route, partition) if to is None else find_target(database, to).node_id
    if unreachable and not accept_loss:
        refuse_unproven(database)
    return plan_move(route, partition, node, mode="unreachable" if unreachable else "live")


def choose_node(database: Database, route: Route, partition: int, *, unfit: Collection[NodeId] = ()) -> NodeId:
    """Return the other node that has the fewest of the topic, `unfit` ones last. Raises Conflict without one."""
    home = next((r.node for r in route.ranges if r.partition == partition), NodeId(0))
    in_use = [r.node for r in route.ranges]
    serving = [node for node in load_nodes(database) if node.takes_partitions and node.node_id != home]
    with database.connection() as connection:
        row = connection.execute(query("topic_home_zone"), {"name": route.topic}).fetchone()
    # A class that waits for replicas is refused on a node without any.
    waits = route.durability in ("replica", "quorum")
    able = [node for node in serving if node.node_id not in unfit and (node.replicas or not waits)]
    serving = able or serving
    at_home = [node for node in serving if row is not None and row[1] and node.zone == row[1]]
    return emptiest((node.node_id for node in at_home or serving), in_use, other_than=home)


def apply_change(runtime: Runtime, plan: ChangePlan) -> Route:
    """Finish the topic's open changes, then `apply_plan`. Raises Conflict, too, if an open change can't finish."""
    finish_earlier(runtime, plan.topic)
    return apply_plan(runtime, plan)


def apply_plan(runtime: Runtime, plan: ChangePlan, *, note: ChangeNote | None = None) -> Route:
    """Apply a plan, return the new route. `note` writes in the transaction that records it.

    Raises Conflict, nothing changed, if the route differs or a change is open, ConfigurationRefused for a node that
    can't hold the topic's class; StoreUnavailable leaves the change to the worker or the next command.
    """
    _refuse_homes(runtime, plan)
    change_id = _record_plan(runtime, plan, note)
    failpoint("change.after_plan")
    try:
        state = finish_change(runtime, change_id)
    except StoreUnavailable as error:
        raise type(error)(
            error.address, f"{error.reason}; change {change_id} stays open: mqlayer route repair {plan.topic}"
        ) from error
    if state == "dropped":
        raise Conflict(f"change {change_id} of topic {plan.topic!r} was dropped meanwhile", "nothing was changed")
    return load_route(runtime.control, plan.topic)


def _refuse_homes(runtime: Runtime, plan: ChangePlan) -> None:
    durability = load_route(runtime.control, plan.topic).durability
    if durability == NODE:
        return
    fresh = {one.node for one in plan.successors} - {one.node for one in plan.parents}
    refuse_nodes(runtime, [node for node in load_nodes(runtime.control) if node.node_id in fresh], durability)


def drop_change(runtime: Runtime, topic: str) -> int:
    """Drop a topic's open change; return its id. Raises NotFound, Conflict once it is sealing."""
    with runtime.control.connection() as connection:
        row = connection.execute(query("change_unfinished"), {"topic": topic}).fetchone()
    if row is None:
        raise NotFound("open route change of topic", topic, "there is nothing to drop")
    change_id = int(row[0])

    def work(connection: Connection) -> None:
        change = locked(connection, change_id)
        if change.state != "planned":
            raise Conflict(
                f"change {change_id} of topic {topic!r} is {change.state}", "it only goes forward: mqlayer route repair"
            )
        for name in ("change_drop", "change_parents_free", "change_successors_delete"):
            connection.execute(query(name), {"change_id": change_id})
        write_audit(connection, runtime.actor, "route drop", topic, {"change": change_id, "kind": change.kind})
        failpoint("drop.before_commit")

    runtime.control.transaction(work)
    return change_id


def _plannable(database: Database, topic: str, if_version: int | None) -> Route:
    route = load_route(database, check_name("topic", topic))
    if if_version is not None and route.version != if_version:
        raise Conflict(f"topic {topic!r} is at route version {route.version}, not {if_version}", "look at it again")
    with database.connection() as connection:
        row = connection.execute(query("change_unfinished"), {"topic": topic}).fetchone()
    if row is not None:
        raise Conflict(f"change {row[0]} of topic {topic!r} is open", f"finish it first: mqlayer route repair {topic}")
    return route


def finish_earlier(runtime: Runtime, topic: str) -> None:
    """Finish a topic's open changes. Raises Conflict if one has to wait."""
    came_to = finish_changes(runtime, topic=topic)
    for change_id, word in came_to.items():
        if word not in ("done", "dropped"):
            raise Conflict(f"change {change_id} of topic {topic!r} is not finished", word)


def _record_plan(runtime: Runtime, plan: ChangePlan, note: ChangeNote | None) -> int:
    names = node_names(runtime.control)

    def work(connection: Connection) -> int:
        connection.execute(query("transaction_patience"), TIMEOUTS)
        row = connection.execute(query("topic_lock"), {"name": plan.topic}).fetchone()
        if row is None:
            raise NotFound("topic", plan.topic, f"create it: mqlayer topic create {plan.topic}")
        if row[0] != plan.topic_id or row[4] != plan.base:
            raise Conflict(
                f"topic {plan.topic!r} is at route version {row[4]}, the plan starts from {plan.base}",
                "somebody changed it meanwhile: plan again",
            )
        facts = {
            "topic_id": plan.topic_id,
            "version": plan.version,
            "kind": plan.kind,
            "mode": plan.mode,
            "actor": runtime.actor,
        }
        if connection.execute(query("change_unfinished"), {"topic": plan.topic}).fetchone():
            raise Conflict(
                f"another change of topic {plan.topic!r} is open", "wait for it, or finish it: mqlayer route repair"
            )
        new = connection.execute(query("change_insert"), facts).fetchone()
        change_id = int(new[0]) if new else 0
        for successor in plan.successors:
            place = {"lp_from": successor.lp_from, "lp_to": successor.lp_to, "node_id": successor.node}
            made = connection.execute(query("change_successor"), facts | place | {"change_id": change_id})
            if made.fetchone() is None:
                raise draining_conflict(names.get(successor.node, str(successor.node)))
        parents = [r.partition for r in plan.parents]
        ended = connection.execute(query("change_parents_put"), {"change_id": change_id, "partitions": parents})
        if ended.rowcount != len(parents):
            raise InvalidInput(f"not all of partitions {parents} are open")
        write_audit(connection, runtime.actor, f"route {plan.kind}", plan.topic, {
            "change": change_id, "version": plan.version, "parents": list(parents),
            "successors": [[s.lp_from, s.lp_to, s.node] for s in plan.successors],
        })  # fmt: skip
        if note is not None:
            note(connection, change_id)
        failpoint("change.before_plan_commit")
        return change_id

    return runtime.control.transaction(work)
