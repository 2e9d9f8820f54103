"""Archive the streams of archived topics: `docs/design/archive.md`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mqlayer.archive.batch_writer import BatchResult, BatchWriter
from mqlayer.archive.batches import ArchiveBatch, end_stopped, in_batch, make_days
from mqlayer.archive.copy_rows import PartitionChains
from mqlayer.archive.outcome_archiver import OutcomeReport, move_outcomes
from mqlayer.archive.stream_reader import ArchiveInput, StreamPages, page_size
from mqlayer.domain.routing import NodeId
from mqlayer.errors import Conflict, MqlayerError, StoreUnavailable, TransactionConflict
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redis.node_connection import Node
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)


@dataclass(slots=True)
class ArchiveReport:
    """Result of a pass.

    `stopped`: partitions at an unaccepted gap. `skipped_nodes`: with the reason. `locked_topics`: by other processes.
    `failed`: partitions with an unreadable record. `ended`: nothing is left.
    """

    archived: dict[str, int] = field(default_factory=dict)
    completed: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    skipped_nodes: dict[str, str] = field(default_factory=dict)
    locked_topics: list[str] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    outcomes: OutcomeReport = field(default_factory=OutcomeReport)
    ended: bool = True

    @property
    def total(self) -> int:
        """All archived records."""
        return sum(self.archived.values())


def archive_pass(runtime: Runtime, *, topic: str | None = None, at_most_s: float | None = None) -> ArchiveReport:
    """Archive records and outcomes of archived topics, or of one.

    All partitions in turn; no batch starts after `at_most_s`. Skips unavailable and unarmed nodes. Safe to kill and
    to run concurrently.
    """
    report = ArchiveReport()
    until = float("inf") if at_most_s is None else time.monotonic() + at_most_s
    with runtime.control.connection() as connection:
        topics = connection.execute(query("archive_topics"), {"topic": topic}).fetchall()
    if not topics:
        return report
    make_days(runtime.control)
    failpoint("archive.after_days")
    nodes = {node.node_id: node for node in load_nodes(runtime.control)}
    with NodePool(runtime, nodes.__getitem__) as pool:
        sources = _Sources(pool, nodes, report, runtime.prefix)
        for topic_id, name, body_limit in topics:
            _TopicPass(runtime.control, sources, report, topic_id, name, page_size(body_limit), until).run()
            # In batches of their own.
            move_outcomes(runtime, topic_id, name, report.outcomes, until=until)
    report.ended &= report.outcomes.ended
    if report.total:
        log.info("archived", extra={"records": report.total, "topics": len(report.archived)})
    return report


class _Sources:
    """Partitions' contents. `nodes`: as of the start: one armed meanwhile waits for the next pass."""

    def __init__(self, pool: NodePool, nodes: Mapping[NodeId, Node], report: ArchiveReport, prefix: str) -> None:
        self._pool, self._nodes, self._report, self._prefix = pool, nodes, report, prefix
        self._unreachable: set[NodeId] = set()

    def read(self, source: ArchiveInput, since: int) -> StreamPages | None:
        if source.node in self._unreachable or source.node not in self._nodes:
            return None
        try:
            return self.pages(source, since)
        except MqlayerError as error:
            self.skip_node(source.node, error)
            return None

    def pages(self, source: ArchiveInput, since: int) -> StreamPages:
        return StreamPages(self._pool.to(source.node), self._prefix, source, since)

    def skip_node(self, node_id: NodeId, error: MqlayerError) -> None:
        self._unreachable.add(node_id)
        name = self._nodes[node_id].name
        self._report.skipped_nodes[name] = str(error)
        log.warning("archive_node_skipped", extra={"node": name, "reason": str(error)})


class _TopicPass:
    def __init__(
        self,
        database: Database,
        sources: _Sources,
        report: ArchiveReport,
        topic_id: int,
        topic: str,
        page_size: int,
        until: float,
    ) -> None:
        self._database, self._sources, self._report = database, sources, report
        self._topic_id, self._topic, self._page_size, self._until = topic_id, topic, page_size, until
        self._done: set[int] = set()
        self._succeeded = True
        self._chains: dict[int, PartitionChains] = {}
        # The batch and segment that the chains have reached.
        self._position = (-1, -1)

    def run(self) -> None:
        try:
            while self._round():
                pass
        except TransactionConflict as error:
            self._report.locked_topics.append(self._topic)
            log.warning("archive_topic_locked", extra={"topic": self._topic, "reason": str(error)})
            end_stopped(self._database)
            return
        if self._report.ended and self._succeeded:
            with self._database.connection() as connection:
                connection.execute(query("archive_passed"), {"topic_id": self._topic_id})

    def _round(self) -> bool:
        connection = deque((source, since) for source, since in self._work() if source.partition not in self._done)
        completed = False
        while connection:
            if time.monotonic() >= self._until:
                self._report.ended = False
                return False
            source, since = connection.popleft()
            written = self._batch(source, since)
            completed |= written.complete
            if written.more and not written.stopped:
                connection.append((source, written.upto))
            else:
                self._done.add(source.partition)
        return completed

    def _work(self) -> Iterator[tuple[ArchiveInput, int]]:
        with self._database.connection() as connection:
            rows = connection.execute(query("archive_work"), {"topic_id": self._topic_id}).fetchall()
        for partition, node, version, lp_from, lp_to, upto, *sealed in rows:
            yield (
                ArchiveInput(
                    self._topic_id, partition, NodeId(node), version, lp_from, lp_to, self._page_size, *sealed
                ),
                upto,
            )

    def _batch(self, source: ArchiveInput, since: int) -> BatchResult:
        pages = self._sources.read(source, since)
        failpoint("archive.after_read")
        if pages is None or not pages.first:
            return BatchResult(since)
        stock = [pages]

        def work(connection: Connection, batch: ArchiveBatch) -> BatchResult:
            # A retry after a conflict reads again: the first read is consumed.
            given = stock.pop() if stock else self._sources.pages(source, since)
            return BatchWriter(connection, batch, self._chains_of(source, batch), since).write(given)

        try:
            written = in_batch(self._database, self._topic_id, work)
        except (StoreUnavailable, Conflict) as error:
            return self._failed(source, since, error)
        failpoint("archive.after_commit")
        return self._note_progress(source, written or BatchResult(since))

    def _failed(self, source: ArchiveInput, since: int, error: StoreUnavailable | Conflict) -> BatchResult:
        if isinstance(error, StoreUnavailable) and error.address != self._database.address:
            self._sources.skip_node(source.node, error)
        else:
            # Without this the pass would count as complete, and only the log would show the failure.
            self._succeeded = False
            self._report.failed[source.partition] = str(error)
            log.error("archive_failed", extra={"partition": source.partition, "reason": str(error)})
        return BatchResult(since)

    def _chains_of(self, source: ArchiveInput, batch: ArchiveBatch) -> PartitionChains:
        position = (batch.number, batch.segment)
        if position != self._position:
            self._chains.clear()
        # Until the commit, the chains are ahead of the archive.
        self._position = (-1, -1)
        return self._chains.setdefault(source.partition, PartitionChains(source))

    def _note_progress(self, source: ArchiveInput, written: BatchResult) -> BatchResult:
        if written.moved:
            # Another archiver has it, or its node fell back: left for the next pass.
            return written
        if written.batch is not None:
            self._chains[source.partition].settle(written.batch.segment)
            self._position = (written.batch.number + bool(written.records), written.batch.segment)
        if written.records:
            self._report.archived[self._topic] = self._report.archived.get(self._topic, 0) + written.records
        if written.complete:
            self._report.completed.append(source.partition)
        if written.stopped:
            self._report.stopped.append(source.partition)
            facts = {"topic": self._topic, "partition": source.partition, "gaps": len(written.gaps)}
            log.error("archive_stopped_at_gap", extra=facts)
        return written
