"""Retire groups; remove their parked rows and keys on nodes (docs/design/ownership.md).

*live* -> *retired* (one transaction, higher epochs) -> *resting* (a node keeps a lock against late owners) ->
*forgotten*, after GRACE_S. Ordered pop keeps its locks, because receivers have no lease. A row of `assignment` stays
until its node confirms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from mqlayer.domain.routing import NodeId
from mqlayer.errors import Conflict, MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import Group, find_group
from mqlayer.groups.rebalance import change_group
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.bounded_delete import forget_rows
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Node
from mqlayer.redis.retirement_script import group_forget_command, group_forget_reply
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

GRACE_S: Final = 600.0
"""How long a lock refuses late owners."""
PARTITIONS_AT_ONCE: Final = 1_000
FORGET_S: Final = 7 * 86_400.0
"""Age at which a retired instance's row goes."""
JOB: Final = "retire_groups"


@dataclass(frozen=True, slots=True)
class RetirementReport:
    """A retired group, its instances and parked messages."""

    group: Group
    instances: int
    parked: int


class RetiredPartition(NamedTuple):
    """`for_long`: the grace period is over; `popped`: ordered pop."""

    group_id: int
    partition: int
    node: NodeId
    epoch: int
    archived: bool
    for_long: bool
    popped: bool


def retire_group(runtime: Runtime, topic: str, name: str, *, drop_parked: bool = False) -> RetirementReport:
    """Retire a group and its instances for good, or one instance until it returns.

    It then bounds neither trimming nor partition retirement; the job `retire_groups` removes its remains. Raises
    NotFound, Conflict if members live, it is retired, or messages are parked without `drop_parked`; then nothing
    changes.
    """
    group = find_group(runtime.control, topic, name)

    def work(connection: Connection) -> RetirementReport:
        _refuse_living(connection, group)
        ids = [group.group_id, *_instances(connection, group)]
        ((parked,),) = connection.execute(query("parked_of_groups"), {"group_ids": ids}).fetchall()
        if parked and not drop_parked:
            raise Conflict(
                f"{parked} messages are parked in group {name!r} of topic {topic!r}",
                f"see mqlayer parked list {topic} {name}, then release or discard them, or retire with --drop-parked",
            )
        if not retire_locked(connection, group.group_id):
            raise Conflict(f"group {name!r} of topic {topic!r} is retired already", "there is nothing to do")
        for instance in ids[1:]:
            retire_locked(connection, instance)
        facts = {"group_id": group.group_id, "instances": len(ids) - 1, "parked": parked}
        write_audit(connection, runtime.actor, "group retire", f"{topic}/{name}", facts)
        failpoint("group_retire.before_commit")
        return RetirementReport(group, len(ids) - 1, parked)

    done = change_group(runtime.control, group.group_id, work)
    failpoint("group_retire.after_commit")
    log.warning("group_retired", extra={"topic": topic, "group": name, "instances": done.instances})
    return done


def _refuse_living(connection: Connection, group: Group) -> None:
    living = connection.execute(query("group_members_living"), {"group_id": group.group_id}).fetchall()
    if living:
        member, host, pid = living[0]
        raise Conflict(
            f"group {group.name!r} of topic {group.topic!r} has {len(living)} living members, one is {member!r} "
            f"(process {pid} on {host})",
            "stop them, or let their leases run out, then retire it",
        )


def _instances(connection: Connection, group: Group) -> list[int]:
    rows = connection.execute(query("instances_of"), {"group_id": group.group_id}).fetchall()
    for (instance,) in rows:
        connection.execute(query("group_lock"), {"group_id": instance})
    # A member may have joined before the lock was taken.
    _refuse_living(connection, group)
    return [row[0] for row in rows]


def retire_locked(connection: Connection, group_id: int) -> bool:
    """Retire a group whose lock is held; False if it was retired."""
    facts = {"group_id": group_id}
    if connection.execute(query("group_retire"), facts).fetchone() is None:
        return False
    connection.execute(query("redrives_of_group_cancel"), facts)
    connection.execute(query("assignments_of_group_free"), facts)
    connection.execute(query("members_forget"), facts)
    connection.execute(query("beginnings_forget"), facts)
    connection.execute(query("allocation_raise"), facts)
    return True


def retire_absent(runtime: Runtime) -> list[str]:
    """Retire instances absent beyond `instance_expiry_s`; return their names."""
    job = replace(runtime, actor=JOB)
    with runtime.control.connection() as connection:
        found = connection.execute(query("instances_absent")).fetchall()
    gone = []
    for group_id, topic, name in found:
        try:
            if retire_absent_instance(job, group_id, topic, name):
                gone.append(name)
        except MqlayerError as error:
            log.warning("instance_retirement_delayed", extra={"topic": topic, "group": name, "reason": str(error)})
    return gone


def retire_absent_instance(runtime: Runtime, group_id: int, topic: str, name: str) -> bool:
    """Retire an instance; False if it may still return."""

    def work(connection: Connection) -> bool:
        facts = {"group_id": group_id}
        row = connection.execute(query("instance_absent"), facts).fetchone()
        if row is None or not retire_locked(connection, group_id):
            return False
        write_audit(
            connection,
            runtime.actor,
            "group retire",
            f"{topic}/{name}",
            {"group_id": group_id, "absent_s": round(row[0], 1)},
        )
        failpoint("instance_retire.before_commit")
        return True

    done = change_group(runtime.control, group_id, work)
    failpoint("instance_retire.after_commit")
    if done:
        log.warning("instance_position_dropped", extra={"topic": topic, "group": name, "by": runtime.actor})
    return done


def forget_retired(runtime: Runtime, *, grace_s: float = GRACE_S) -> int:
    """Remove retired groups' parked rows and node keys; return the number of cleared partitions.

    Locks go `grace_s` after retirement. Skips unavailable nodes. Safe to call concurrently.
    """
    with runtime.control.connection() as connection:
        holders = [row[0] for row in connection.execute(query("retired_parked")).fetchall()]
    for group_id in holders:
        drop_parked(runtime.control, group_id)
    # Read runs before epochs: a node armed in between then refuses the older requests.
    nodes = {node.node_id: node for node in load_nodes(runtime.control)}
    forgotten = 0
    after = (0, 0)
    while retired_partitions := _retired_partitions(runtime.control, after, grace_s):
        by_node: dict[NodeId, list[RetiredPartition]] = {}
        for retired in retired_partitions:
            if retired.node in nodes:
                by_node.setdefault(retired.node, []).append(retired)
        for node_id, of_node in by_node.items():
            replies = _forget(runtime, nodes[node_id], of_node)
            if not replies:
                # Or each page would wait for it.
                del nodes[node_id]
            # A receiver cut off from Postgres may ask for ever, so the lock that refuses it stays.
            words = [
                "forgotten" if word == "lock_only" and retired.for_long and retired.popped else word
                for retired, word in zip(of_node, replies, strict=False)
            ]
            failpoint("group_retire.after_forget")
            forgotten += words.count("forgotten")
            _note(runtime.control, "retired_keys_gone", of_node, words, "forgotten")
            # An epoch was given out during the retirement, unless the group came back.
            _note(runtime.control, "retired_keys_raise", of_node, words, "unchanged")
        after = (retired_partitions[-1].group_id, retired_partitions[-1].partition)
    if forgotten:
        log.info("retired_groups_forgotten", extra={"partitions": forgotten})
    return forgotten


def forget_instances(database: Database, *, horizon_s: float = FORGET_S) -> int:
    """Delete retired instances without remains after `horizon_s`; return how many."""
    return forget_rows(database, query("instances_forget"), {"horizon_s": horizon_s})


def drop_parked(database: Database, group_id: int) -> None:
    """Delete a retired group's parked rows, in bounded steps."""
    facts = {"group_id": group_id}
    while forget_rows(database, query("retired_messages_drop"), facts):
        failpoint("group_retire.after_parked")
    while forget_rows(database, query("retired_keys_drop"), facts):
        pass


def _retired_partitions(database: Database, after: tuple[int, int], grace_s: float) -> Sequence[RetiredPartition]:
    facts = {"after_s": grace_s, "after_group": after[0], "after_partition": after[1], "limit": PARTITIONS_AT_ONCE}
    with database.connection() as connection:
        return [RetiredPartition(*row) for row in connection.execute(query("retired_keys"), facts).fetchall()]


def _forget(runtime: Runtime, node: Node, retired_partitions: Sequence[RetiredPartition]) -> list[str]:
    try:
        with runtime.connection(node) as connection:
            commands = [
                group_forget_command(
                    connection,
                    runtime.prefix,
                    retired.partition,
                    retired.group_id,
                    retired.epoch,
                    for_good=retired.for_long and not retired.popped,
                    archived=retired.archived,
                )
                for retired in retired_partitions
            ]
            return [group_forget_reply(reply, node.address) for reply in connection.call(commands)]
    except MqlayerError as error:
        log.warning("retired_node_skipped", extra={"node": node.name, "reason": str(error)})
        return []


def _note(
    database: Database, name: str, retired_partitions: Sequence[RetiredPartition], words: Sequence[str], wanted: str
) -> None:
    chosen = [retired for retired, word in zip(retired_partitions, words, strict=False) if word == wanted]
    if chosen:
        facts = {
            "groups": [retired.group_id for retired in chosen],
            "partitions": [retired.partition for retired in chosen],
            "epochs": [retired.epoch for retired in chosen],
        }
        with database.connection() as connection:
            connection.execute(query(name), facts)
