"""Move a living group to another position (docs/design/ownership.md, "Positions and seeks")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from mqlayer.domain.routing import NodeId
from mqlayer.errors import Conflict, MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import Group, check_start, find_group, put_beginnings, raise_group_version, refuse_broadcast
from mqlayer.groups.rebalance import change_group, rebalance
from mqlayer.groups.start_positions import (
    Start,
    StartFinder,
    StartPosition,
    UndeletedPartition,
    still_hold,
    undeleted_partitions,
)
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Node, raise_for_reply
from mqlayer.redis.partition_scripts import fence_command
from mqlayer.runtime.route_cache import RouteCache, load_nodes
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)


@dataclass(frozen=True, slots=True)
class SeekPlan:
    """The start in each partition, parents first."""

    group: Group
    to: Start
    partitions: Sequence[UndeletedPartition]
    beginnings: Sequence[StartPosition]


def planned_seek(runtime: Runtime, routes: RouteCache, *, topic: str, name: str, to: Start) -> SeekPlan:
    """Plan a seek; change nothing. `to`: see `start_positions`.

    Raises InvalidInput for a broadcast group or a time without zone, NotFound, Conflict for a group that is not live,
    StoreUnavailable.
    """
    check_start(to)
    group = find_group(runtime.control, topic, name)
    _check_live(group)
    with runtime.control.connection() as connection:
        partitions = undeleted_partitions(connection, group.topic_id)
    beginnings = StartFinder(runtime, routes, partitions).of(to)
    return SeekPlan(group, to, partitions, beginnings)


def apply_seek(runtime: Runtime, plan: SeekPlan, *, replay: bool = False) -> list[str]:
    """Apply a plan; return nodes where old owners are not fenced yet: next owners do that.

    `replay`: apply fenced effects again. Raises Conflict, nothing changed, if the group was moved, runs a replay or
    backfill, or a node was armed or given up since the plan.
    """

    def work(connection: Connection) -> dict[UndeletedPartition, int]:
        epochs = _change_position(connection, plan, replay=replay)
        facts = {"to": _describe(plan.to), "replay": replay}
        write_audit(connection, runtime.actor, "group seek", f"{plan.group.topic}/{plan.group.name}", facts)
        failpoint("seek.before_commit")
        return epochs

    # Before the commit: an error after it would look as if nothing had changed.
    nodes = {node.node_id: node for node in load_nodes(runtime.control)}
    epochs = change_group(runtime.control, plan.group.group_id, work)
    failpoint("seek.after_commit")
    log.info(
        "group_seek_applied", extra={"topic": plan.group.topic, "group": plan.group.name, "to": _describe(plan.to)}
    )
    return fence_old_owners(runtime, nodes, plan.group.group_id, epochs)


def _change_position(connection: Connection, plan: SeekPlan, *, replay: bool) -> dict[UndeletedPartition, int]:
    group_id = plan.group.group_id
    facts = {"group_id": group_id, "seek": plan.group.seek, "replay": replay}
    refuse_beside_replay(connection, plan.group)
    if connection.execute(query("group_seek"), facts).fetchone() is None:
        raise Conflict(
            f"group {plan.group.name!r} of topic {plan.group.topic!r} was sent elsewhere in the meantime",
            "look where it is now, and seek again",
        )
    if not still_hold(connection, plan.partitions, plan.beginnings):
        raise Conflict(
            f"a node that topic {plan.group.topic!r} is on was armed again or given up in the meantime",
            "its offsets may be others now: look at the plan again, and seek",
        )
    connection.execute(query("beginnings_forget"), facts)
    # Parents may be retired since the plan; newer successors start at their first record.
    kept = {one.partition: one for one in undeleted_partitions(connection, plan.group.topic_id)}
    put_beginnings(connection, group_id, [one for one in plan.beginnings if one.partition in kept])
    raise_group_version(connection, group_id)
    epochs = connection.execute(query("assignments_of_group_raise"), facts).fetchall()
    connection.execute(query("assignment_free_unreadable"), facts)
    rebalance(connection, group_id)
    connection.execute(query("allocation_raise"), facts)
    return {kept[partition]: epoch for partition, epoch in epochs if partition in kept}


def refuse_beside_replay(connection: Connection, group: Group) -> None:
    """Raise Conflict during a replay or backfill. Call under the group's lock."""
    row = connection.execute(query("replay_running"), {"group_id": group.group_id}).fetchone()
    if row is not None:
        raise Conflict(
            f"group {group.name!r} of topic {group.topic!r} is given what the archive holds, by {row[1]} {row[0]}",
            f"wait for its end, or: mqlayer replay cancel {row[0]}",
        )


def fence_old_owners(
    runtime: Runtime, nodes: Mapping[NodeId, Node], group_id: int, epochs: Mapping[UndeletedPartition, int]
) -> list[str]:
    """Put epochs in force on the nodes; return the names of unavailable ones."""
    by_node: dict[NodeId, list[tuple[int, int]]] = {}
    for kept, epoch in epochs.items():
        by_node.setdefault(kept.node, []).append((kept.partition, epoch))
    missed: list[str] = []
    for node_id, pairs in by_node.items():
        node = nodes[node_id]
        try:
            with runtime.connection(node) as connection:
                for reply in connection.call(
                    [fence_command(connection, runtime.prefix, p, group_id, epoch) for p, epoch in pairs]
                ):
                    raise_for_reply(reply, node.address)
        except MqlayerError as error:
            missed.append(node.name)
            log.warning("old_owners_not_fenced", extra={"node": node.name, "reason": str(error)})
    return missed


def _check_live(group: Group) -> None:
    refuse_broadcast(group)
    if group.state != "live":
        raise Conflict(
            f"group {group.name!r} of topic {group.topic!r} is {group.state}, not live", "only a live group can seek"
        )


def _describe(to: Start) -> str:
    return to.isoformat() if isinstance(to, datetime) else to
