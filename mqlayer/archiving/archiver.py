"""The archiver: moves what stands in the streams of archived topics into the archive, batch after batch.

A batch is a stretch of one partition. Postgres has it whole or not at all, with the marks and the offset behind it, so
whoever comes after a crash goes on there. Identity makes records unique: what the marks have already is left out, what
is not the successor of a mark stops the partition before it.

A key's records come in the order of (batch, log_offset): successors wait until their parents are complete, and what a
node gives out again after it fell back is in later batches.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mqlayer.archiving.batches import Batch, end_stopped, in_batch, make_days
from mqlayer.archiving.outcomes import OutcomeReport, move_outcomes
from mqlayer.archiving.reading import Pieces, Source, piece_of
from mqlayer.archiving.rows import Chains
from mqlayer.archiving.writing import Writer, Written
from mqlayer.domain.routing import NodeId
from mqlayer.errors import Conflict, MqlayerError, StoreUnavailable, TransactionConflict
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redis.nodes import Node, NodeConnection
from mqlayer.routes.cache import load_nodes

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ArchiveReport:
    """What a pass did: records archived per topic, partitions that are complete since, partitions that stand before a
    gap nobody accepted, nodes that were passed by, with the reason, topics that somebody else holds, and
    partitions with a record that can't be archived; and likewise of what became of messages. `ended`: nothing that can
    be read is left."""

    archived: dict[str, int] = field(default_factory=dict)
    completed: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    passed_by: dict[str, str] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    outcomes: OutcomeReport = field(default_factory=OutcomeReport)
    ended: bool = True

    @property
    def total(self) -> int:
        """Records archived in all."""
        return sum(self.archived.values())


def archive_pass(
    database: Database, *, prefix: str, topic: str | None = None, at_most_s: float | None = None, unsafe: bool = False
) -> ArchiveReport:
    """Archive what stands in the streams of archived topics; of one, or of all.

    Each partition is read to its end, batches of all of them in turn; after `at_most_s` no further batch is begun. A
    node that is away or not armed is passed by and reported, and keeps nothing else waiting. Safe to run twice at
    once, and to be killed at any line: every record is in the archive once.
    """
    report = ArchiveReport()
    until = float("inf") if at_most_s is None else time.monotonic() + at_most_s
    with database.connection() as connection:
        topics = connection.execute(query("archive_topics"), {"topic": topic}).fetchall()
    if not topics:
        return report
    make_days(database)
    failpoint("archive.after_days")
    nodes = {node.node_id: node for node in load_nodes(database)}
    with _Lines(nodes, report, prefix=prefix, unsafe=unsafe) as lines:
        for topic_id, name, body_limit in topics:
            _Turn(database, lines, report, topic_id, name, piece_of(body_limit), until).run()
            # In batches of their own.
            move_outcomes(database, topic_id, name, report.outcomes, prefix=prefix, until=until, unsafe=unsafe)
    report.ended &= report.outcomes.ended
    if report.total:
        log.info("archived", extra={"records": report.total, "topics": len(report.archived)})
    return report


class _Lines:
    """Connections to nodes, and which are away in this pass."""

    def __init__(self, nodes: Mapping[NodeId, Node], report: ArchiveReport, *, prefix: str, unsafe: bool) -> None:
        # As of the pass's beginning: a node that is armed anew meanwhile is left for the next pass.
        self._nodes, self._report, self._prefix, self._unsafe = nodes, report, prefix, unsafe
        self._lines: dict[NodeId, NodeConnection] = {}
        self._away: set[NodeId] = set()

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._lines.values():
            line.close()

    def read(self, source: Source, since: int) -> Pieces | None:
        """Begin to read a partition; None where its node is away."""
        if source.node in self._away or source.node not in self._nodes:
            return None
        try:
            return self.pieces(source, since)
        except MqlayerError as error:
            self.pass_by(source.node, error)
            return None

    def pieces(self, source: Source, since: int) -> Pieces:
        """Begin to read a partition. Raises StoreUnavailable, NodeNotArmed."""
        if source.node not in self._lines:
            self._lines[source.node] = NodeConnection(self._nodes[source.node], unsafe=self._unsafe)
        return Pieces(self._lines[source.node], self._prefix, source, since)

    def pass_by(self, node_id: NodeId, error: MqlayerError) -> None:
        """Ask a node for nothing more in this pass."""
        self._away.add(node_id)
        name = self._nodes[node_id].name
        self._report.passed_by[name] = str(error)
        log.warning("archive_node_passed_by", extra={"node": name, "reason": str(error)})


class _Turn:
    """One topic's turn in a pass."""

    def __init__(
        self,
        database: Database,
        lines: _Lines,
        report: ArchiveReport,
        topic_id: int,
        topic: str,
        piece: int,
        until: float,
    ) -> None:
        self._database, self._lines, self._report = database, lines, report
        self._topic_id, self._topic, self._piece, self._until = topic_id, topic, piece, until
        self._done: set[int] = set()
        self._well = True
        self._chains: dict[int, Chains] = {}
        # The batch and stretch behind which the chains stand.
        self._stand = (-1, -1)

    def run(self) -> None:
        """Archive every partition to its end, also those that become ready when their parents are complete."""
        try:
            while self._round():
                pass
        except TransactionConflict as error:
            self._report.held.append(self._topic)
            log.warning("archive_topic_held", extra={"topic": self._topic, "reason": str(error)})
            end_stopped(self._database)
            return
        if self._report.ended and self._well:
            with self._database.connection() as connection:
                connection.execute(query("archive_passed"), {"topic_id": self._topic_id})

    def _round(self) -> bool:
        """Archive what is ready, a batch of each partition in turn; say whether something else is ready since."""
        line = deque((source, since) for source, since in self._work() if source.partition not in self._done)
        completed = False
        while line:
            if time.monotonic() >= self._until:
                self._report.ended = False
                return False
            source, since = line.popleft()
            written = self._batch(source, since)
            completed |= written.complete
            if written.more and not written.stopped:
                line.append((source, written.upto))
            else:
                self._done.add(source.partition)
        return completed

    def _work(self) -> Iterator[tuple[Source, int]]:
        with self._database.connection() as connection:
            rows = connection.execute(query("archive_work"), {"topic_id": self._topic_id}).fetchall()
        for partition, node, version, lp_from, lp_to, upto, *sealed in rows:
            yield Source(self._topic_id, partition, NodeId(node), version, lp_from, lp_to, self._piece, *sealed), upto

    def _batch(self, source: Source, since: int) -> Written:
        """Archive a stretch of a partition, where there is one."""
        pieces = self._lines.read(source, since)
        failpoint("archive.after_read")
        if pieces is None or not pieces.first:
            return Written(since)
        stock = [pieces]

        def work(connection: Connection, batch: Batch) -> Written:
            # Once more after a conflict: what was read before was given out already.
            given = stock.pop() if stock else self._lines.pieces(source, since)
            return Writer(connection, batch, self._chains_of(source, batch), since).write(given)

        try:
            written = in_batch(self._database, self._topic_id, work)
        except (StoreUnavailable, Conflict) as error:
            return self._failed(source, since, error)
        failpoint("archive.after_commit")
        return self._noted(source, written or Written(since))

    def _failed(self, source: Source, since: int, error: StoreUnavailable | Conflict) -> Written:
        """Leave a node, or a partition with a record that can't be archived, for the next pass."""
        if isinstance(error, StoreUnavailable) and error.address != self._database.address:
            self._lines.pass_by(source.node, error)
        else:
            # Nobody came to its end: else nobody would hear of it but readers of logs.
            self._well = False
            self._report.failed[source.partition] = str(error)
            log.error("archive_failed", extra={"partition": source.partition, "reason": str(error)})
        return Written(since)

    def _chains_of(self, source: Source, batch: Batch) -> Chains:
        """Return a partition's chains; afresh where somebody else wrote a batch, or this is another try."""
        stand = (batch.number, batch.stretch)
        if stand != self._stand:
            self._chains.clear()
        # Until the batch is there, the chains are ahead of the archive.
        self._stand = (-1, -1)
        return self._chains.setdefault(source.partition, Chains(source))

    def _noted(self, source: Source, written: Written) -> Written:
        if written.moved:
            # Somebody else archives it, or its node fell back: the next pass looks anew.
            return written
        if written.batch is not None:
            self._chains[source.partition].settle(written.batch.stretch)
            self._stand = (written.batch.number + bool(written.records), written.batch.stretch)
        if written.records:
            self._report.archived[self._topic] = self._report.archived.get(self._topic, 0) + written.records
        if written.complete:
            self._report.completed.append(source.partition)
        if written.stopped:
            self._report.stopped.append(source.partition)
            facts = {"topic": self._topic, "partition": source.partition, "gaps": len(written.gaps)}
            log.error("archive_stopped_at_gap", extra=facts)
        return written
