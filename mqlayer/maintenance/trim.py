"""Trimming passes over all partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, NodeNotArmed
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Node, raise_for_reply
from mqlayer.redis.partition_scripts import GroupStart, trim_command
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
    """Records dropped per partition; skipped nodes with reasons."""

    dropped: dict[int, int] = field(default_factory=dict)
    skipped_nodes: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Records dropped in all."""
        return sum(self.dropped.values())


class TrimTarget(NamedTuple):
    """A partition to trim; `floor`: first unarchived offset."""

    partition: int
    starts: list[GroupStart]
    floor: int


def trim_pass(runtime: Runtime, *, topic: str | None = None) -> TrimReport:
    """Drop records that every group has settled (invariant 10), if archived where the topic is.

    Topics without groups, and successors of unretired parents, keep everything. Some hundred settled records stay. Safe
    to run concurrently; silent nodes are skipped and reported.
    """
    names = [topic] if topic is not None else [summary.name for summary in list_topics(runtime.control)]
    return runtime.control.transaction(lambda connection: _pass(runtime, connection, names))


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
    for node_id, partitions in work.items():
        if node_id not in nodes:
            continue
        try:
            node = nodes[node_id]

            def check(node: Node = node) -> None:
                if _armings(connection)[node.node_id] != armed[node.node_id]:
                    raise NodeNotArmed(node.address, "it was armed anew while it was trimmed: the next pass goes on")

            _trim_node(runtime, node, partitions, report, check)
        except MqlayerError as error:
            report.skipped_nodes[nodes[node_id].name] = str(error)
            log.warning("trim_node_skipped", extra={"node": nodes[node_id].name, "reason": str(error)})
    if report.total:
        log.info("trimmed", extra={"records": report.total, "partitions": len(report.dropped)})
    return report


def _work_by_node(connection: Connection, names: Iterable[str]) -> dict[NodeId, list[TrimTarget]]:
    found: dict[NodeId, list[TrimTarget]] = {}
    for name in names:
        for partition, node_id, *starts, floor in connection.execute(query("trim_work"), {"topic": name}):
            groups = list(map(GroupStart, *starts))
            if groups:
                found.setdefault(node_id, []).append(
                    TrimTarget(partition, groups, NO_FLOOR if floor is None else floor)
                )
    return found


def _armings(connection: Connection) -> dict[NodeId, tuple[Any, ...]]:
    """Include the time: FLUSHALL keeps the run."""
    rows = connection.execute(query("node_list")).fetchall()
    return {NodeId(node_id): (run_id, armed_at) for node_id, _, _, run_id, *_, armed_at in rows}


def _trim_node(
    runtime: Runtime, node: Node, work: list[TrimTarget], report: TrimReport, check: Callable[[], None]
) -> None:
    """Repeat until nothing is dropped; `check` raises between."""
    with runtime.connection(node) as connection:
        for _ in range(ROUNDS):
            commands = [
                trim_command(connection, runtime.prefix, one.partition, one.starts, floor=one.floor, limit=ENTRY_LIMIT)
                for one in work
            ]
            check()
            replies = connection.call(commands)
            failpoint("trim.after_round")
            counts = [_dropped(reply, node.address) for reply in replies]
            for one, count in zip(work, counts, strict=True):
                if count:
                    report.dropped[one.partition] = report.dropped.get(one.partition, 0) + count
            work = [one for one, count in zip(work, counts, strict=True) if count]
            if not work:
                return


def _dropped(reply: Any, address: str) -> int:
    word, *facts = raise_for_reply(reply, address)
    return int(facts[0]) if word == b"trimmed" else 0
