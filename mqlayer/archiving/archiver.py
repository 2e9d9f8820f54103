"""The archiver: moves what stands in the streams of archived topics into the archive, batch after batch.

A batch is a stretch of one partition. Postgres has it whole or not at all, with the marks and the offset behind it, so
whoever comes after a crash goes on there. Identity makes records unique: what the marks have already is left out, what
is not the successor of a mark stops the partition before it. Nodes are asked for the next stretch while Postgres takes
the last one.

A key's records come in the order of (batch, log_offset): successors wait until their parents are complete, and what a
node gives out again after it fell back is in later batches.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from mqlayer.archiving.batches import Batch, in_batch, make_days
from mqlayer.archiving.reading import Source, Stretch, piece_of, read_stretch
from mqlayer.archiving.rows import Known, New, Pair, Sifted, copy_in, parsed, sift
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, NodeNotArmed
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redis.nodes import Node, NodeConnection
from mqlayer.routes.cache import load_nodes

log = logging.getLogger(__name__)

NO_LIMIT: Final = 2**62
"""An accepted gap of any size: what was published while archiving was off."""


@dataclass(slots=True)
class ArchiveReport:
    """What a pass did: records archived per topic, partitions that are complete since, partitions that stand before a
    gap nobody accepted, and nodes that were passed by, with the reason. `ended`: nothing that can be read is left."""

    archived: dict[str, int] = field(default_factory=dict)
    completed: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    passed_by: dict[str, str] = field(default_factory=dict)
    ended: bool = True

    @property
    def total(self) -> int:
        """Records archived in all."""
        return sum(self.archived.values())


def archive_pass(
    database: Database, *, prefix: str, topic: str | None = None, at_most_s: float | None = None, unsafe: bool = False
) -> ArchiveReport:
    """Archive what stands in the streams of archived topics; of one, or of all.

    Each partition is read to its end, batches of all of them in turn; after `at_most_s` no further batch is begun. A node
    that is away or not armed is passed by and reported, and keeps nothing else waiting. Safe to run twice at once, and
    to be killed at any line: every record is in the archive once.
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
    with _Reader(nodes, prefix=prefix, unsafe=unsafe) as reader:
        for topic_id, name, body_limit in topics:
            _Pass(database, reader, report, topic_id, name, piece_of(body_limit), until).run()
    for node_id, reason in reader.away.items():
        report.passed_by[nodes[node_id].name] = reason
        log.warning("archive_node_passed_by", extra={"node": nodes[node_id].name, "reason": reason})
    if report.total:
        log.info("archived", extra={"records": report.total, "topics": len(report.archived)})
    return report


class _Reader:
    """Reads stretches in a thread of its own, one after the other; knows which nodes are away in this pass."""

    def __init__(self, nodes: Mapping[NodeId, Node], *, prefix: str, unsafe: bool) -> None:
        self._nodes, self._prefix, self._unsafe = nodes, prefix, unsafe
        self._lines: dict[NodeId, NodeConnection] = {}
        self._thread = ThreadPoolExecutor(1, "archive-reader")
        self.away: dict[NodeId, str] = {}

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        for line in self._lines.values():
            line.close()

    def ask(self, source: Source, since: int) -> Future[Read | None]:
        """Begin to read a stretch; None where the partition's node is away."""
        return self._thread.submit(self._read, source, since)

    def _read(self, source: Source, since: int) -> Read | None:
        if source.node in self.away:
            return None
        if source.node not in self._lines:
            # Nodes are as of the pass's beginning: one that is armed anew meanwhile is left for the next pass.
            self._lines[source.node] = NodeConnection(self._nodes[source.node], unsafe=self._unsafe)
        line = self._lines[source.node]
        try:
            stretch = read_stretch(line, self._prefix, source, since)
            return Read(source, stretch, parsed(stretch, source, line.node.address))
        except MqlayerError as error:
            self.away[source.node] = str(error)
            return None


@dataclass(frozen=True, slots=True)
class Read:
    """A stretch of a partition, and its records."""

    source: Source
    stretch: Stretch
    records: list[New]

    @property
    def end(self) -> int:
        """The offset behind it."""
        entries = self.stretch.entries
        return int(entries[-1][0][:-2]) + 1 if entries else self.stretch.since


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a stretch: how many records are new, whether the partition is complete or stands before a gap.

    `moved`: somebody else moved the partition on, or its node fell back: the stretch says nothing any more.
    """

    records: int = 0
    complete: bool = False
    stopped: bool = False
    moved: bool = False


class _Pass:
    """One topic's turn in a pass."""

    def __init__(
        self,
        database: Database,
        reader: _Reader,
        report: ArchiveReport,
        topic_id: int,
        topic: str,
        piece: int,
        until: float,
    ) -> None:
        self._database, self._reader, self._report = database, reader, report
        self._topic_id, self._topic, self._piece, self._until = topic_id, topic, piece, until
        self._done: set[int] = set()

    def run(self) -> None:
        """Archive every partition to its end, also those that become ready when their parents are complete."""
        while self._turn():
            pass
        if self._report.ended:
            with self._database.connection() as connection:
                connection.execute(query("archive_passed"), {"topic_id": self._topic_id})

    def _turn(self) -> bool:
        """Archive what is ready; say whether something else is since."""
        line = deque(item for item in self._work() if item[0].partition not in self._done)
        completed = False
        asked = self._ask(line)
        while asked is not None:
            read = asked.result()
            following = self._following(read)
            line.extend(following)
            # The next stretch is read while this one is written; where this one is not, the next is left out too.
            asked = self._ask(line)
            if read is not None and self._write(read).complete:
                completed = True
        return completed

    def _work(self) -> Iterable[tuple[Source, int]]:
        with self._database.connection() as connection:
            rows = connection.execute(query("archive_work"), {"topic_id": self._topic_id}).fetchall()
        for partition, node, version, upto, seal_id, cut in rows:
            yield Source(self._topic_id, partition, NodeId(node), version, seal_id, cut, self._piece), upto

    def _ask(self, line: deque[tuple[Source, int]]) -> Future[Read | None] | None:
        while line:
            if time.monotonic() >= self._until:
                self._report.ended = False
                return None
            source, since = line.popleft()
            if source.partition not in self._report.stopped:
                return self._reader.ask(source, since)
        return None

    def _following(self, read: Read | None) -> Iterable[tuple[Source, int]]:
        if read is None:
            return ()
        if read.stretch.more:
            return ((read.source, read.end),)
        self._done.add(read.source.partition)
        return ()

    def _write(self, read: Read) -> Written:
        failpoint("archive.after_read")
        if not read.stretch.entries and read.stretch.command is None:
            return Written()
        try:
            written = in_batch(
                self._database, self._topic_id, lambda connection, batch: _write(connection, batch, read)
            )
        except NodeNotArmed as error:
            self._reader.away[read.source.node] = str(error)
            return Written()
        failpoint("archive.after_commit")
        if written is None or written.moved:
            # The next pass looks anew.
            return Written()
        partition = read.source.partition
        if written.records:
            self._report.archived[self._topic] = self._report.archived.get(self._topic, 0) + written.records
        if written.complete:
            self._report.completed.append(partition)
        if written.stopped:
            self._report.stopped.append(partition)
            log.error("archive_stopped_at_gap", extra={"topic": self._topic, "partition": partition})
        return written


def _write(connection: Connection, batch: Batch, read: Read) -> Written:
    """Write a stretch under the lock on its topic's archive: records, marks and progress in one transaction."""
    source, since = read.source, read.stretch.since
    place = {"partition_id": source.partition}
    row = connection.execute(query("archive_progress"), place).fetchone()
    if (row or (1, False)) != (since, False):
        return Written(moved=True)
    sifted = sift(read.records, read.end, _known(connection, batch, read.records))
    failpoint("archive.before_copy")
    if sifted.new:
        copy_in(connection, source, batch.number, batch.at, sifted.new)
    failpoint("archive.after_copy")
    # What a run said that is not the armed one any more may have been taken back, and its offsets given to others.
    armed = connection.execute(query("archive_run"), place).fetchone()
    if armed is None or armed[0] != read.stretch.run_id:
        raise NodeNotArmed(f"partition {source.partition}", "its node was armed anew while it was archived")
    command = read.stretch.command
    complete = not sifted.stopped and command is not None and command.seal_id == source.seal_id
    facts = place | {"topic_id": batch.topic_id, "upto": sifted.upto, "since": since, "complete": complete}
    if connection.execute(query("archive_progress_put"), facts).fetchone() is None:
        raise NodeNotArmed(f"partition {source.partition}", "its node fell back while it was archived")
    _raise_marks(connection, batch, source, sifted)
    if sifted.new:
        batch.put(connection, records=len(sifted.new))
    failpoint("archive.before_commit")
    return Written(len(sifted.new), complete, sifted.stopped)


def _known(connection: Connection, batch: Batch, records: list[New]) -> dict[Pair, Known]:
    pairs = list({record.pair for record in records})
    facts = {
        "topic_id": batch.topic_id,
        "sources": [source for source, _ in pairs],
        "lps": [lp for _, lp in pairs],
    }
    rows = connection.execute(query("archive_marks"), facts).fetchall()
    return {
        (source, lp): Known(last, NO_LIMIT if stretch < batch.stretch else accepted or 0)
        for source, lp, last, stretch, accepted in rows
    }


def _raise_marks(connection: Connection, batch: Batch, source: Source, sifted: Sifted) -> None:
    if sifted.gaps:
        columns = list(zip(*((*gap.pair, *gap[1:]) for gap in sifted.gaps), strict=True))
        names = ("sources", "lps", "afters", "nexts", "offsets", "accepted")
        facts: dict[str, Any] = {"topic_id": batch.topic_id, "partition_id": source.partition}
        connection.execute(query("archive_gaps_put"), facts | dict(zip(names, map(list, columns), strict=True)))
    if sifted.lasts:
        facts = {
            "topic_id": batch.topic_id,
            "stretch": batch.stretch,
            "sources": [one for one, _ in sifted.lasts],
            "lps": [lp for _, lp in sifted.lasts],
            "firsts": [sifted.firsts.get(pair, 0) for pair in sifted.lasts],
            "lasts": list(sifted.lasts.values()),
        }
        connection.execute(query("archive_marks_put"), facts)
