"""Send a living group elsewhere: back to what is still kept, or forward.

Where a group stands is what it committed in Redis since its last seek, else where it starts (Postgres). A seek is one
transaction in Postgres: where it starts now, which partitions count as drained, its route version, higher epochs for
all it holds, one seek more. Whoever takes a partition under such an epoch finds what was committed before void, and
begins at the start. So partitions of older route versions are readable again and those after them are not, in one step.

States: *before* and *after* the commit; a crash leaves one of the two. Old owners are fenced in Redis right after it;
where that did not happen, the next owner's taking does it, and they hear of it by their next heartbeat.
"""

from __future__ import annotations

import logging
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
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Node, NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import fence_command
from mqlayer.runtime.route_cache import RouteCache, load_nodes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SeekPlan:
    """Where a group will go: in each of its partitions, parents first, the next offset that it is given."""

    group: Group
    to: Start
    partitions: Sequence[UndeletedPartition]
    beginnings: Sequence[StartPosition]


def planned_seek(
    database: Database, routes: RouteCache, *, topic: str, name: str, to: Start, prefix: str, unsafe: bool = False
) -> SeekPlan:
    """Return where a seek would take a group; nothing is changed. `to`: as a new group's start, see `start_positions`.

    Raises InvalidInput for a time without a zone, NotFound, Conflict for a group that is not live, StoreUnavailable
    where a node can't be asked for its offsets.
    """
    check_start(to)
    group = find_group(database, topic, name)
    _check_live(group)
    with database.connection() as connection:
        partitions = undeleted_partitions(connection, group.topic_id)
    beginnings = StartFinder(routes, partitions, prefix=prefix, unsafe=unsafe).of(to)
    return SeekPlan(group, to, partitions, beginnings)


def apply_seek(
    database: Database, plan: SeekPlan, *, prefix: str, actor: str, replay: bool = False, unsafe: bool = False
) -> list[str]:
    """Do what a plan says; return the names of nodes whose old owners could not be fenced at once.

    `replay`: effects that were applied under the fence are applied again, in order; else they are passed over. Raises
    Conflict where the group was sent elsewhere since the plan was made, or a node whose offsets are in it was armed
    again or given up; nothing is changed then.
    """

    def work(connection: Connection) -> dict[UndeletedPartition, int]:
        epochs = _change_position(connection, plan, replay=replay)
        facts = {"to": _describe(plan.to), "replay": replay}
        write_audit(connection, actor, "group seek", f"{plan.group.topic}/{plan.group.name}", facts)
        failpoint("seek.before_commit")
        return epochs

    # Looked up first: what fails after the commit must not look as if nothing had been done.
    nodes = {node.node_id: node for node in load_nodes(database)}
    epochs = change_group(database, plan.group.group_id, work)
    failpoint("seek.after_commit")
    log.info(
        "group_seek_applied", extra={"topic": plan.group.topic, "group": plan.group.name, "to": _describe(plan.to)}
    )
    return fence_old_owners(nodes, plan.group.group_id, epochs, prefix=prefix, unsafe=unsafe)


def _change_position(connection: Connection, plan: SeekPlan, *, replay: bool) -> dict[UndeletedPartition, int]:
    """Let a group whose lock is held begin anew; return the new epoch of each partition that it ever held."""
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
    # Parents may have been retired since the plan was made; successors that came since begin with their first record.
    kept = {one.partition: one for one in undeleted_partitions(connection, plan.group.topic_id)}
    put_beginnings(connection, group_id, [one for one in plan.beginnings if one.partition in kept])
    raise_group_version(connection, group_id)
    epochs = connection.execute(query("assignments_of_group_raise"), facts).fetchall()
    connection.execute(query("assignment_free_unreadable"), facts)
    rebalance(connection, group_id)
    connection.execute(query("allocation_raise"), facts)
    return {kept[partition]: epoch for partition, epoch in epochs if partition in kept}


def refuse_beside_replay(connection: Connection, group: Group) -> None:
    """Raise Conflict where a group is being replayed or backfilled: it goes by where the group stood at its beginning.

    Call with the group's lock held.
    """
    row = connection.execute(query("replay_running"), {"group_id": group.group_id}).fetchone()
    if row is not None:
        raise Conflict(
            f"group {group.name!r} of topic {group.topic!r} is given what the archive holds, by {row[1]} {row[0]}",
            f"wait for its end, or: mqlayer replay cancel {row[0]}",
        )


def fence_old_owners(
    nodes: Mapping[NodeId, Node], group_id: int, epochs: Mapping[UndeletedPartition, int], *, prefix: str, unsafe: bool
) -> list[str]:
    """Put higher epochs in force on all nodes; return the names of those that can't be asked."""
    by_node: dict[NodeId, list[tuple[int, int]]] = {}
    for kept, epoch in epochs.items():
        by_node.setdefault(kept.node, []).append((kept.partition, epoch))
    missed: list[str] = []
    for node_id, pairs in by_node.items():
        node = nodes[node_id]
        try:
            with NodeConnection(node, unsafe=unsafe) as connection:
                for reply in connection.call(
                    [fence_command(connection, prefix, p, group_id, epoch) for p, epoch in pairs]
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
