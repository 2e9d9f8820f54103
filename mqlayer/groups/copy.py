"""Begin a group where another one stands (docs/design/copied-groups.md).

One transaction holds the source's lock and trimming: it inserts the group, copies positions on the nodes, then parked
rows, and commits. Effects follow while the copy is paused; a second call continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Unpack

from mqlayer.domain.names import check_name
from mqlayer.domain.routing import LP_COUNT, NodeId
from mqlayer.errors import Conflict, MqlayerError, NotFound
from mqlayer.failpoints import failpoint
from mqlayer.groups.admin import put_settings
from mqlayer.groups.group import (
    Group,
    GroupChanges,
    GroupSettings,
    find_group,
    put_beginnings,
    raise_group_version,
    read_group,
    settings_of,
)
from mqlayer.groups.rebalance import change_group
from mqlayer.groups.seek import refuse_beside_replay
from mqlayer.groups.start_positions import StartPosition, UndeletedPartition, still_hold, undeleted_partitions
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.redis.copy_script import group_copy_command, group_copy_reply
from mqlayer.redis.node_connection import Node
from mqlayer.redis.retirement_script import group_forget_command
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

PARKED_MESSAGES: Final = 100_000
PARKED_BYTES: Final = 256 * 1024 * 1024
"""Most parked messages of a source, and their bytes: one transaction copies them."""
LPS_AT_ONCE: Final = 64
ROWS_AT_ONCE: Final = 5_000
IDLE_S: Final = 15.0
"""Longer than a node may take to answer."""
COPYING: Final = "group copy"
"""Pauses a copy until it has its source's effects."""


@dataclass(frozen=True, slots=True)
class CopyReport:
    """A copied group. `parked_*`: copied rows; `effects`: copied rows of fence and inbox, None if not asked for."""

    group: Group
    partitions: int
    parked_keys: int = 0
    parked_messages: int = 0
    effects: int | None = None


def copy_group(
    runtime: Runtime, topic: str, source: str, name: str, *, effects: bool = False, **changes: Unpack[GroupChanges]
) -> CopyReport:
    """Create a group where `source` stands: positions, failed attempts, parked keys; return it. The source goes on.

    `effects`: effects of the source count as applied in the copy. `changes`: settings other than the source's. Raises
    NotFound; InvalidInput; Conflict if the name is taken, the source has no members by its mode, is not live, runs a
    replay, or has too many parked messages; StoreUnavailable for one unavailable node. Then no group was made, unless
    effects are missing: it stays paused, and the same call continues.
    """
    check_name("group", name)
    settings = settings_of(**changes)
    found = find_group(runtime.control, topic, source)
    _check_source(found)
    report = _unfinished(runtime, found, name) if effects else None
    if report is None:
        copy = partial(_copy, runtime=runtime, source=found, name=name, settings=settings, paused=effects)
        report = change_group(runtime.control, found.group_id, copy, idle_s=IDLE_S)
        failpoint("group_copy.after_commit")
        log.info("group_copied", extra={"topic": topic, "group": name, "source": source})
    if not effects:
        return report
    return _with_effects(runtime, found, report)


def _check_source(group: Group) -> None:
    if group.mode != "exclusive" or group.instance is not None:
        raise Conflict(
            f"group {group.name!r} of topic {group.topic!r} is {'an instance' if group.instance else group.mode}",
            "only a group with members, each with partitions of its own, can be copied: create the group, and seek",
        )
    if group.state != "live":
        raise Conflict(f"group {group.name!r} of topic {group.topic!r} is {group.state}", "copy a live group")


def _unfinished(runtime: Runtime, source: Group, name: str) -> CopyReport | None:
    """Return a copy that a crash left without its effects."""
    with runtime.control.connection() as connection:
        facts = {"group_id": source.group_id, "name": name, "paused_by": COPYING}
        rows = connection.execute(query("group_copy_unfinished"), facts).fetchall()
    return CopyReport(find_group(runtime.control, source.topic, name), 0) if rows else None


def _copy(
    connection: Connection, runtime: Runtime, source: Group, name: str, settings: GroupSettings, *, paused: bool
) -> CopyReport:
    now = read_group(connection, source.topic, source.name)
    _check_source(now)
    refuse_beside_replay(connection, now)
    _refuse_many_parked(connection, now)
    # Else the source settles on, and what the copy has not handled yet is trimmed.
    connection.execute(query("trim_keep_out"))
    group_id = _insert(connection, now, name, paused=paused)
    partitions = undeleted_partitions(connection, now.topic_id)
    facts = {"group_id": now.group_id, "topic_id": now.topic_id, "new_id": group_id}
    starts = {row[0]: (row[1], row[2]) for row in connection.execute(query("group_copy_starts"), facts).fetchall()}
    epochs: dict[int, int] = dict(connection.execute(query("group_copy_epochs"), facts).fetchall())
    nodes = {node.node_id: node for node in load_nodes(runtime.control)}
    copied = NodePositions(runtime, nodes, now, group_id, epochs)
    try:
        beginnings = copied.copy(partitions, starts)
        failpoint("group_copy.after_positions")
        if not still_hold(connection, partitions, beginnings):
            raise Conflict(f"a node of topic {now.topic!r} was armed meanwhile", "copy the group again")
        put_beginnings(connection, group_id, beginnings)
        raise_group_version(connection, group_id)
        # After the positions: a message is parked before it is settled, so it is in either.
        keys, messages = connection.execute(query("parked_copy"), facts).fetchall()[0]
        group = read_group(connection, now.topic, name)
        if settings != GroupSettings():
            put_settings(connection, runtime.actor, group, settings)
        write_audit(
            connection,
            runtime.actor,
            "group copy",
            f"{now.topic}/{name}",
            {"from": now.name, "partitions": len(epochs), "parked": messages, "effects": paused},
        )
        failpoint("group_copy.before_commit")
        return CopyReport(read_group(connection, now.topic, name), len(epochs), keys, messages)
    except BaseException:
        copied.forget(partitions)
        raise


def _refuse_many_parked(connection: Connection, source: Group) -> None:
    ((messages, size),) = connection.execute(query("parked_size"), {"group_id": source.group_id}).fetchall()
    if messages > PARKED_MESSAGES or size > PARKED_BYTES:
        raise Conflict(
            f"{messages:,} messages ({size:,} bytes) are parked in group {source.name!r} of topic {source.topic!r}: "
            f"one transaction copies up to {PARKED_MESSAGES:,} ({PARKED_BYTES:,} bytes)",
            f"release or discard some: mqlayer parked list {source.topic} {source.name}",
        )


def _insert(connection: Connection, source: Group, name: str, *, paused: bool) -> int:
    facts = {"group_id": source.group_id, "name": name, "paused_by": COPYING if paused else None}
    row = connection.execute(query("group_copy_insert"), facts).fetchone()
    if row is None:
        raise Conflict(f"topic {source.topic!r} has a group {name!r}", "choose another name: a name is used once")
    return int(row[0])


@dataclass(frozen=True, slots=True)
class NodePositions:
    """Positions of a copy on its nodes; `epochs`: of the partitions that the source has not drained."""

    runtime: Runtime
    nodes: Mapping[NodeId, Node]
    source: Group
    group_id: int
    epochs: Mapping[int, int]

    def copy(
        self, partitions: Sequence[UndeletedPartition], starts: Mapping[int, tuple[int, bool]]
    ) -> list[StartPosition]:
        """Copy them; return where the copy starts, in the partitions' order. Raises StoreUnavailable, NodeNotArmed."""
        committed: dict[int, int] = {}
        for node_id, given in self._by_node(partitions).items():
            with self.runtime.connection(self.nodes[node_id]) as connection:
                commands = [
                    group_copy_command(
                        connection,
                        self.runtime.prefix,
                        partition,
                        (self.source.group_id, self.group_id),
                        self.epochs[partition],
                        start=starts[partition][0],
                        seek=self.source.seek,
                    )
                    for partition in given
                ]
                for partition, reply in zip(given, connection.call(commands), strict=True):
                    committed[partition] = group_copy_reply(reply, connection.node.address)
        return [
            StartPosition(
                one.partition, committed.get(one.partition, starts[one.partition][0]), starts[one.partition][1]
            )
            for one in partitions
        ]

    def forget(self, partitions: Sequence[UndeletedPartition]) -> None:
        """Remove them, where nodes answer: no group has them."""
        for node_id, given in self._by_node(partitions).items():
            try:
                with self.runtime.connection(self.nodes[node_id]) as connection:
                    connection.call(
                        [
                            group_forget_command(
                                connection,
                                self.runtime.prefix,
                                partition,
                                self.group_id,
                                self.epochs[partition] + 1,
                                for_good=True,
                                archived=False,
                            )
                            for partition in given
                        ]
                    )
            except MqlayerError as error:
                log.warning("copied_positions_left", extra={"node": self.nodes[node_id].name, "reason": str(error)})

    def _by_node(self, partitions: Sequence[UndeletedPartition]) -> dict[NodeId, list[int]]:
        found: dict[NodeId, list[int]] = {}
        for one in partitions:
            if one.partition in self.epochs:
                found.setdefault(one.node, []).append(one.partition)
        return found


def _with_effects(runtime: Runtime, source: Group, report: CopyReport) -> CopyReport:
    """Copy effects after the positions: all before a position are there then; then let members begin."""
    group_id = report.group.group_id
    count = _copy_effects(runtime, source, group_id)
    failpoint("group_copy.before_resume")

    def resume(connection: Connection) -> None:
        facts = {"group_id": group_id}
        if connection.execute(query("group_resume"), facts).fetchone() is None:
            raise NotFound("copy", report.group.name, "somebody retired it or let it go on: look at its audit rows")
        connection.execute(query("allocation_raise"), facts)

    change_group(runtime.control, group_id, resume)
    group = find_group(runtime.control, source.topic, report.group.name)
    return CopyReport(group, report.partitions, report.parked_keys, report.parked_messages, count)


def _copy_effects(runtime: Runtime, source: Group, new_id: int) -> int:
    of_groups = {"group_id": source.group_id, "new_id": new_id}
    with runtime.control.connection() as connection:
        ((replay,),) = connection.execute(query("group_replay"), of_groups).fetchall()
    facts = of_groups | {"replay": replay, "limit": ROWS_AT_ONCE}
    count = 0
    for lp in range(0, LP_COUNT, LPS_AT_ONCE):
        count += runtime.outbox.transaction(partial(_copy_fence, facts | {"lp_from": lp, "lp_to": lp + LPS_AT_ONCE}))
    after: str | None = ""
    while after is not None:
        after, copied = runtime.outbox.transaction(partial(_copy_inbox, facts | {"after": after}))
        count += copied
    return count


def _copy_fence(facts: Mapping[str, Any], connection: Connection) -> int:
    ((copied,),) = connection.execute(query("fence_copy"), facts).fetchall()
    return int(copied)


def _copy_inbox(facts: Mapping[str, Any], connection: Connection) -> tuple[str | None, int]:
    ((last, copied),) = connection.execute(query("inbox_copy"), facts).fetchall()
    return last, int(copied)
