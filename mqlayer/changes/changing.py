"""Plan and apply: what operators and programs call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mqlayer.changes.load import measured_load
from mqlayer.changes.steps import finish_change, finish_changes, locked
from mqlayer.domain.changes import Plan, emptiest, halving_point, plan_merge, plan_move, plan_split
from mqlayer.domain.routing import NodeId, Route
from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.routes.cache import load_nodes, load_route
from mqlayer.topics.nodes import find_node, note


def split(
    database: Database,
    topic: str,
    partition: int,
    *,
    prefix: str,
    at: Sequence[int] = (),
    to: Sequence[str] = (),
    measure_s: float = 0.0,
    actor: str = "api",
    unsafe: bool = False,
) -> Route:
    """Split a partition at the LPs given, or where its measured load is halved; return the route then in force.

    `to`: one node for all successors or one for each; the partition's own where none is named. `measure_s`: for how
    long the load is measured; 0 takes all that the partition ever took in. Raises as `apply_change`.
    """

    def plan(route: Route) -> Plan:
        points = list(at)
        if not points:
            loads = measured_load(database, route, partition, prefix=prefix, over_s=measure_s, unsafe=unsafe)
            r = next(r for r in route.ranges if r.partition == partition)
            points = [halving_point(loads, r.lp_from, r.lp_to)]
        return plan_split(route, partition, points, [find_node(database, name).node_id for name in to])

    return _plan_and_apply(database, topic, plan, prefix=prefix, actor=actor, unsafe=unsafe)


def merge(
    database: Database,
    topic: str,
    partitions: Sequence[int],
    *,
    prefix: str,
    to: str | None = None,
    actor: str = "api",
    unsafe: bool = False,
) -> Route:
    """Merge adjacent partitions into one, on the node named or the first one's; return the route then in force."""

    def plan(route: Route) -> Plan:
        return plan_merge(route, partitions, None if to is None else find_node(database, to).node_id)

    return _plan_and_apply(database, topic, plan, prefix=prefix, actor=actor, unsafe=unsafe)


def move(
    database: Database,
    topic: str,
    partition: int,
    *,
    prefix: str,
    to: str | None = None,
    actor: str = "api",
    unsafe: bool = False,
) -> Route:
    """Move a partition to the node named, or to the one with the fewest partitions; return the route then in force."""

    def plan(route: Route) -> Plan:
        node = choose_node(database, route, partition) if to is None else find_node(database, to).node_id
        return plan_move(route, partition, node)

    return _plan_and_apply(database, topic, plan, prefix=prefix, actor=actor, unsafe=unsafe)


def choose_node(database: Database, route: Route, partition: int, *, other_than: NodeId | None = None) -> NodeId:
    """Return the node with the fewest partitions of a topic, other than a partition's own. Raises NotFound."""
    home = other_than or next((r.node for r in route.ranges if r.partition == partition), NodeId(0))
    in_use = [r.node for r in route.ranges]
    return emptiest((node.node_id for node in load_nodes(database)), in_use, other_than=home)


def apply_change(
    database: Database,
    plan: Plan,
    *,
    prefix: str,
    application: Database | None = None,
    actor: str = "api",
    unsafe: bool = False,
) -> Route:
    """Do what a plan says, and return the route then in force; nothing is changed where it raises Conflict.

    What an earlier change of the topic left open is finished first. Raises Conflict where the route is not the one
    that was planned on any more, or another change can't be finished now; StoreUnavailable where a node is away: then
    the change stays open, and is finished by the worker, by `finish_changes` or by the next command.
    """
    _finish_earlier(database, plan.topic, prefix=prefix, application=application, unsafe=unsafe)
    change_id = _record_plan(database, plan, actor)
    failpoint("change.after_plan")
    came_to = finish_change(database, change_id, prefix=prefix, application=application, unsafe=unsafe)
    if came_to != "done":
        raise Conflict(f"change {change_id} of topic {plan.topic!r} was dropped", "somebody did so meanwhile")
    return load_route(database, plan.topic)


def drop_change(database: Database, topic: str, *, actor: str = "api") -> int:
    """Give up a topic's open change where nothing is sealed yet; return its id.

    Raises NotFound where no change is open, Conflict where it has to go forward.
    """
    with database.connection() as connection:
        row = connection.execute(query("change_unfinished"), {"topic": topic}).fetchone()
    if row is None:
        raise NotFound("open route change of topic", topic, "nothing is to be dropped")
    change_id = int(row[0])

    def work(connection: Connection) -> None:
        change = locked(connection, change_id)
        if change.state != "planned":
            raise Conflict(
                f"change {change_id} of topic {topic!r} is {change.state}", "it only goes forward: mqlayer route repair"
            )
        for name in ("change_drop", "change_parents_free", "change_successors_delete"):
            connection.execute(query(name), {"change_id": change_id})
        note(connection, actor, "route drop", topic, {"change": change_id, "kind": change.kind})
        failpoint("drop.before_commit")

    database.transaction(work)
    return change_id


def _plan_and_apply(
    database: Database, topic: str, plan: Callable[[Route], Plan], *, prefix: str, actor: str, unsafe: bool
) -> Route:
    _finish_earlier(database, topic, prefix=prefix, unsafe=unsafe)
    return apply_change(database, plan(load_route(database, topic)), prefix=prefix, actor=actor, unsafe=unsafe)


def _finish_earlier(
    database: Database, topic: str, *, prefix: str, application: Database | None = None, unsafe: bool
) -> None:
    came_to = finish_changes(database, prefix=prefix, topic=topic, application=application, unsafe=unsafe)
    for change_id, word in came_to.items():
        if word not in ("done", "dropped"):
            raise Conflict(f"change {change_id} of topic {topic!r} is not finished", word)


def _record_plan(database: Database, plan: Plan, actor: str) -> int:
    """Write the plan down, if the route is still the one that it starts from; return the change's id."""

    def work(connection: Connection) -> int:
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
            "actor": actor,
        }
        if connection.execute(query("change_unfinished"), {"topic": plan.topic}).fetchone():
            raise Conflict(
                f"another change of topic {plan.topic!r} is open", "wait for it, or finish it: mqlayer route repair"
            )
        new = connection.execute(query("change_insert"), facts).fetchone()
        change_id = int(new[0]) if new else 0
        for successor in plan.successors:
            place = {"lp_from": successor.lp_from, "lp_to": successor.lp_to, "node_id": successor.node}
            connection.execute(query("change_successor"), facts | place | {"change_id": change_id})
        parents = [r.partition for r in plan.parents]
        ended = connection.execute(query("change_parents_put"), {"change_id": change_id, "partitions": parents})
        if ended.rowcount != len(parents):
            raise InvalidInput(f"not all of partitions {parents} are open")
        note(connection, actor, f"route {plan.kind}", plan.topic, {
            "change": change_id, "version": plan.version, "parents": list(parents),
            "successors": [[s.lp_from, s.lp_to, s.node] for s in plan.successors],
        })  # fmt: skip
        failpoint("change.before_plan_commit")
        return change_id

    return database.transaction(work)
