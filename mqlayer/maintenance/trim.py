"""Trimming passes over all partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mqlayer.domain.retention import Retention
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, NodeNotArmed
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.maintenance.unsettled_drops import Drops
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Node, NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import GroupStart, trim_command
from mqlayer.redis.retention_scripts import LogBound, bound_command, bound_reply, drop_command, drop_reply
from mqlayer.runtime.route_cache import nodes_by
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics import list_topics

log = event_logger(__name__)

ENTRY_LIMIT: Final = 10_000
"""About ten milliseconds of the node."""
ROUNDS: Final = 100
NO_FLOOR: Final = 2**53
"""Above all offsets: only groups bound the trimming."""
TIMEOUTS: Final = {"lock_wait": "10s", "idle": "120s"}
"""The open transaction locks only trimming."""


@dataclass(slots=True)
class TrimReport:
    """Records dropped per partition; skipped nodes with reasons. `unweighed`: nodes that don't tell a stream's size."""

    dropped: dict[int, int] = field(default_factory=dict)
    skipped_nodes: dict[str, str] = field(default_factory=dict)
    unsettled: Drops = field(default_factory=Drops)
    unweighed: set[str] = field(default_factory=set)

    @property
    def total(self) -> int:
        """Records dropped in all."""
        return sum(self.dropped.values())


class TrimTarget(NamedTuple):
    """A partition to trim; `floor`: first unarchived offset."""

    partition: int
    starts: list[GroupStart]
    floor: int
    archived: bool = False
    limits: Retention = Retention()


def trim_pass(runtime: Runtime, *, topic: str | None = None) -> TrimReport:
    """Drop records that every group has settled (invariant 10), if archived where the topic is, and beyond its limits.

    Topics without groups and limits, and successors of unretired parents, keep everything. Some hundred settled records
    stay. Safe to run concurrently; silent nodes are skipped and reported.
    """
    names = [topic] if topic is not None else [summary.name for summary in list_topics(runtime.control)]
    report = runtime.control.transaction(lambda connection: _pass(runtime, connection, names))
    failpoint("retention.after_commit")
    report.unsettled.finish(runtime)
    return report


def _pass(runtime: Runtime, connection: Connection, names: list[str]) -> TrimReport:
    # Held to the end: switching a topic to archived waits, since this pass read its bounds before.
    connection.execute(query("transaction_patience"), TIMEOUTS)
    connection.execute(query("trim_enter"))
    # Runs before bounds: a node that is armed in between must not be trimmed by bounds from before.
    nodes = {node.node_id: node for node in nodes_by(connection)}
    armed = _armings(connection)
    work = _work_by_node(connection, names)
    failpoint("trim.after_work")
    report = TrimReport()
    ((now_ms,),) = connection.execute(query("trim_clock")).fetchall()
    for node_id, partitions in work.items():
        if node_id not in nodes:
            continue
        try:
            node = nodes[node_id]

            def check(node: Node = node) -> None:
                if _armings(connection)[node.node_id] != armed[node.node_id]:
                    raise NodeNotArmed(node.address, "it was armed anew while it was trimmed: the next pass goes on")

            with runtime.connection(node) as node_connection:
                _NodeTrimming(runtime, node_connection, report, check, now_ms).run(partitions)
        except MqlayerError as error:
            report.skipped_nodes[nodes[node_id].name] = str(error)
            log.warning("trim_node_skipped", extra={"node": nodes[node_id].name, "reason": str(error)})
    for name in sorted(report.unweighed):
        log.warning("stream_size_unknown", extra={"node": name})
    failpoint("retention.before_count")
    report.unsettled.write(connection, runtime.actor)
    if report.total:
        log.info("trimmed", extra={"records": report.total, "partitions": len(report.dropped)})
    return report


def _work_by_node(connection: Connection, names: Iterable[str]) -> dict[NodeId, list[TrimTarget]]:
    found: dict[NodeId, list[TrimTarget]] = {}
    for name in names:
        for partition, node_id, ids, seeks, offsets, floor, *topic in connection.execute(
            query("trim_work"), {"topic": name}
        ):
            archived, *limits = topic
            groups, retention = list(map(GroupStart, ids, seeks, offsets)), Retention(*limits)
            if groups or retention.limited:
                bound = NO_FLOOR if floor is None else floor
                found.setdefault(node_id, []).append(TrimTarget(partition, groups, bound, archived, retention))
    return found


def _armings(connection: Connection) -> dict[NodeId, tuple[Any, ...]]:
    """Include the time: FLUSHALL keeps the run."""
    rows = connection.execute(query("node_list")).fetchall()
    return {NodeId(node_id): (run_id, armed_at) for node_id, _, _, run_id, *_, armed_at in rows}


class _NodeTrimming:
    """Trims one node's partitions; `check` raises where the node was armed anew."""

    def __init__(
        self, runtime: Runtime, connection: NodeConnection, report: TrimReport, check: Callable[[], None], now_ms: int
    ) -> None:
        self._prefix, self._connection, self._report, self._check = runtime.prefix, connection, report, check
        self._address, self._name, self._now_ms = connection.node.address, connection.node.name, now_ms

    def run(self, work: list[TrimTarget]) -> None:
        """Repeat until nothing is dropped."""
        for _ in range(ROUNDS):
            bounded = self._within_limits(work)
            commands = [
                trim_command(
                    self._connection, self._prefix, one.partition, one.starts, floor=one.floor, limit=ENTRY_LIMIT
                )
                for one in bounded
            ]
            self._check()
            replies = self._connection.call(commands)
            failpoint("trim.after_round")
            passes = [_trimmed(reply, self._address) for reply in replies]
            counts = [count for count, _ in passes]
            for one, (count, expired) in zip(bounded, passes, strict=True):
                self._report.unsettled.add_expired(one.partition, one.starts, expired)
                if count:
                    self._report.dropped[one.partition] = self._report.dropped.get(one.partition, 0) + count
            going = {one.partition for one, count in zip(bounded, counts, strict=True) if count}
            work = [one for one in work if one.partition in going]
            if not work:
                return

    def _within_limits(self, work: list[TrimTarget]) -> list[TrimTarget]:
        limited = [one for one in work if one.limits.limited]
        if not limited:
            return work
        bounds = self._bounds(limited)
        failpoint("retention.after_bound")
        positions = self._move([one for one in limited if one.limits.drops and one.partition in bounds], bounds)
        failpoint("retention.after_drop")
        return [
            one
            if not one.limits.limited
            else one._replace(
                floor=min(one.floor, bounds[one.partition].offset),
                starts=[_moved(one.partition, start, positions) for start in one.starts],
            )
            for one in work
            if one.partition in bounds or not one.limits.limited
        ]

    def _bounds(self, work: list[TrimTarget]) -> dict[int, LogBound]:
        replies = self._connection.call(
            [
                bound_command(
                    self._connection, self._prefix, one.partition, one.limits,
                    starts=[] if one.limits.drops else one.starts, floor=one.floor, now_ms=self._now_ms,
                )
                for one in work
            ]
        )  # fmt: skip
        found = {
            one.partition: bound
            for one, reply in zip(work, replies, strict=True)
            if (bound := bound_reply(reply, self._address)) is not None
        }
        if not all(bound.weighed for bound in found.values()):
            self._report.unweighed.add(self._name)
        return found

    def _move(self, work: list[TrimTarget], bounds: dict[int, LogBound]) -> dict[tuple[int, int], int]:
        places = [(one, start) for one in work for start in one.starts]
        if not places:
            return {}
        commands = [
            drop_command(
                self._connection, self._prefix, one.partition, start, bounds[one.partition], archived=one.archived
            )
            for one, start in places
        ]
        self._check()
        moved: dict[tuple[int, int], int] = {}
        for (one, start), reply in zip(places, self._connection.call(commands), strict=True):
            position = drop_reply(reply, self._address)
            if position is not None:
                self._report.unsettled.add(one.partition, start, position)
                moved[one.partition, start.group_id] = position.offset
        return moved


def _moved(partition: int, start: GroupStart, positions: dict[tuple[int, int], int]) -> GroupStart:
    return start._replace(offset=max(start.offset, positions.get((partition, start.group_id), 0)))


def _trimmed(reply: Any, address: str) -> tuple[int, list[int]]:
    """Return the records dropped, and per group how many expired messages it settled ever."""
    word, *facts = raise_for_reply(reply, address)
    return (int(facts[0]), facts[2:]) if word == b"trimmed" else (0, [])
