"""Move outcomes from nodes and Postgres into the archive, each once: `docs/design/archive.md`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mqlayer.archive.batches import ArchiveBatch, in_batch
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, TransactionConflict
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Node, NodeConnection, raise_for_reply
from mqlayer.redis.outcomes import OutcomeEntry, OutcomeId, entries_of, fetch_command, forget_command
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

CURSORS_PER_CALL: Final = 20
ENTRIES_PER_CURSOR: Final = 200
"""Bounds of a batch: 4,000 entries of at most 500 ranges each."""
ACTS_PER_BATCH: Final = 5_000


@dataclass(slots=True)
class OutcomeReport:
    """Rows per topic; offsets that nodes dropped for lack of an archiver; skipped nodes with the reason; topics locked
    elsewhere. `ended`: nothing is left."""

    archived: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    skipped_nodes: dict[str, str] = field(default_factory=dict)
    locked_topics: list[str] = field(default_factory=list)
    ended: bool = True

    @property
    def total(self) -> int:
        """All archived rows."""
        return sum(self.archived.values())


class OutcomeCursor(NamedTuple):
    """A group's last archived entry of a partition."""

    partition: int
    group_id: int
    after: OutcomeId


Fetched = Sequence[tuple[OutcomeCursor, Sequence[OutcomeEntry]]]


class OutcomeBatchResult(NamedTuple):
    """Written rows, new cursors, dropped offsets."""

    rows: int
    cursors: list[OutcomeCursor]
    dropped: dict[OutcomeCursor, int]


def archive_outcomes(runtime: Runtime, *, topic: str | None = None, at_most_s: float | None = None) -> OutcomeReport:
    """Archive the outcomes of archived topics, or of one.

    Skips unavailable and unarmed nodes. Starts no batch after `at_most_s`. Safe to kill and to run concurrently. Raises
    StoreUnavailable if Postgres is unavailable.
    """
    report = OutcomeReport()
    until = float("inf") if at_most_s is None else time.monotonic() + at_most_s
    with runtime.control.connection() as connection:
        topics = connection.execute(query("archive_topics"), {"topic": topic}).fetchall()
    for topic_id, name, _ in topics:
        move_outcomes(runtime, topic_id, name, report, until=until)
    return report


def move_outcomes(runtime: Runtime, topic_id: int, topic: str, report: OutcomeReport, *, until: float) -> None:
    """Archive one topic's outcomes. `until`: monotonic time."""
    nodes = {node.node_id: node for node in load_nodes(runtime.control)}
    moving = _OutcomePass(runtime, topic_id, report, until)
    try:
        for node_id, cursors in _cursors(runtime.control, topic_id).items():
            moving.from_node(nodes[node_id], cursors)
        moving.from_queue()
    except TransactionConflict as error:
        report.locked_topics.append(topic)
        log.warning("outcomes_topic_locked", extra={"topic": topic, "reason": str(error)})
    if moving.rows:
        report.archived[topic] = moving.rows
        log.info("outcomes_archived", extra={"topic": topic, "rows": moving.rows})


def _cursors(database: Database, topic_id: int) -> Mapping[NodeId, list[OutcomeCursor]]:
    found: dict[NodeId, list[OutcomeCursor]] = {}
    with database.connection() as connection:
        rows = connection.execute(query("outcome_work"), {"topic_id": topic_id}).fetchall()
    for partition, node_id, group_id, epoch, number in rows:
        found.setdefault(NodeId(node_id), []).append(OutcomeCursor(partition, group_id, OutcomeId(epoch, number)))
    return found


class _OutcomePass:
    def __init__(self, runtime: Runtime, topic_id: int, report: OutcomeReport, until: float) -> None:
        self._runtime, self._topic_id, self._report, self._until = runtime, topic_id, report, until
        self.rows = 0

    def _is_over(self) -> bool:
        if time.monotonic() >= self._until:
            self._report.ended = False
        return not self._report.ended

    def from_node(self, node: Node, cursors: Sequence[OutcomeCursor]) -> None:
        with self._runtime.connection(node) as connection:
            for at in range(0, len(cursors), CURSORS_PER_CALL):
                left: Sequence[OutcomeCursor] = cursors[at : at + CURSORS_PER_CALL]
                while left and not self._is_over():
                    try:
                        fetched = _fetch(connection, self._runtime.prefix, left)
                    except MqlayerError as error:
                        self._report.skipped_nodes[node.name] = str(error)
                        log.warning("outcomes_node_skipped", extra={"node": node.name, "reason": str(error)})
                        return
                    # Reading on from these cursors also deletes the entries from the node.
                    left = self._written(fetched)

    def _written(self, fetched: Fetched) -> list[OutcomeCursor]:
        if not fetched:
            return []
        failpoint("outcomes.after_fetch")
        written = in_batch(
            self._runtime.control, self._topic_id, lambda connection, batch: _write(connection, batch, fetched)
        )
        failpoint("outcomes.after_commit")
        if written is None:
            # Archiving was switched off.
            return []
        self.rows += written.rows
        for cursor, dropped in written.dropped.items():
            self._report.dropped += dropped
            facts = {"partition": cursor.partition, "group_id": cursor.group_id, "offsets": dropped}
            log.error("outcomes_dropped", extra=facts)
        return written.cursors

    def from_queue(self) -> None:
        facts = {"topic_id": self._topic_id, "limit": ACTS_PER_BATCH}
        with self._runtime.control.connection() as connection:
            ((left,),) = connection.execute(query("outcome_queue_count"), facts).fetchall()

        def work(connection: Connection, batch: ArchiveBatch) -> tuple[int, int]:
            written = {"batch": batch.number, "at": batch.at}
            ((taken, rows),) = connection.execute(query("outcome_queue_move"), facts | written).fetchall()
            batch.put(connection, outcomes=rows)
            failpoint("outcomes.before_acts_commit")
            return taken, rows

        while left > 0 and not self._is_over():
            moved = in_batch(self._runtime.control, self._topic_id, work)
            if moved is None or not moved[0]:
                return
            left -= moved[0]
            self.rows += moved[1]


def _fetch(connection: NodeConnection, prefix: str, cursors: Sequence[OutcomeCursor]) -> Fetched:
    places = [(prefix, cursor.partition, cursor.group_id, cursor.after) for cursor in cursors]
    commands = [
        command
        for place in places
        for command in (forget_command(*place), fetch_command(*place, count=ENTRIES_PER_CURSOR))
    ]
    replies = [raise_for_reply(reply, connection.node.address) for reply in connection.call(commands)]
    found = [(cursor, entries_of(reply)) for cursor, reply in zip(cursors, replies[1::2], strict=True)]
    return [(cursor, entries) for cursor, entries in found if entries]


def _write(connection: Connection, batch: ArchiveBatch, fetched: Fetched) -> OutcomeBatchResult:
    facts: dict[str, Any] = {
        "groups": [s.group_id for s, _ in fetched],
        "partitions": [s.partition for s, _ in fetched],
    }
    rows = connection.execute(query("outcome_progress"), facts).fetchall()
    places = {(group_id, partition): OutcomeId(epoch, number) for group_id, partition, epoch, number in rows}
    now_at = {cursor: places.get((cursor.group_id, cursor.partition), cursor.after) for cursor, _ in fetched}
    new = [(cursor, entries) for cursor, entries in fetched if now_at[cursor] == cursor.after]
    dropped = {cursor: sum(entry.dropped for entry in entries) for cursor, entries in new}
    count = _put(connection, batch, new)
    if new:
        now_at |= {cursor: entries[-1].entry_id for cursor, entries in new}
        progress = {
            "groups": [cursor.group_id for cursor, _ in new],
            "partitions": [cursor.partition for cursor, _ in new],
            "epochs": [now_at[cursor].epoch for cursor, _ in new],
            "numbers": [now_at[cursor].number for cursor, _ in new],
            "dropped": list(dropped.values()),
        }
        connection.execute(query("outcome_progress_put"), progress)
        batch.put(connection, outcomes=count)
    failpoint("outcomes.before_commit")
    # Another process may have stopped at another entry.
    cursors = [cursor._replace(after=place) for cursor, place in now_at.items()]
    return OutcomeBatchResult(count, cursors, {cursor: offsets for cursor, offsets in dropped.items() if offsets})


def _put(connection: Connection, batch: ArchiveBatch, fetched: Fetched) -> int:
    rows = [
        (cursor.group_id, cursor.partition, one.first, one.last, one.outcome, one.attempts,
         None if one.delivered_ms_ago is None else entry.at_ms - one.delivered_ms_ago, entry.at_ms, entry.member,
         *entry.entry_id)
        for cursor, entries in fetched for entry in entries for one in entry.ranges
    ]  # fmt: skip
    if rows:
        names = ("groups", "partitions", "firsts", "lasts", "words", "attempts", "givens", "ats", "actors", "epochs",
                 "numbers")  # fmt: skip
        columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
        written = {"topic_id": batch.topic_id, "batch": batch.number, "at": batch.at}
        connection.execute(query("outcomes_put"), written | columns)
    return len(rows)
