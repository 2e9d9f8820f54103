"""Write one batch of a partition's records, marks and end offset.

Memory: a few pages.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import psycopg

from mqlayer.archive.batches import ArchiveBatch
from mqlayer.archive.copy_rows import (
    COPY,
    ENDING,
    NOTHING,
    OPENING,
    LpChain,
    PartitionChains,
    SeqGap,
    microseconds,
    row_start,
)
from mqlayer.archive.stream_reader import ArchiveInput, Entry, StreamPages, is_command, offset_of
from mqlayer.errors import NodeNotArmed
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query

RECORDS: Final = 50_000
BYTES: Final = 16_000_000
"""A batch ends with the page that reaches a bound."""


@dataclass(slots=True)
class BatchResult:
    """New records, and the offset that reading reached.

    `stopped`: at an unaccepted gap. `moved`: another process archived it, or its node fell back; nothing was written.
    `more`: records may follow.
    """

    upto: int
    records: int = 0
    complete: bool = False
    stopped: bool = False
    moved: bool = False
    more: bool = False
    batch: ArchiveBatch | None = None
    gaps: list[SeqGap] = field(default_factory=list)


class BatchWriter:
    """Writes one batch; the transaction must lock the topic's archive."""

    def __init__(self, connection: Connection, batch: ArchiveBatch, chains: PartitionChains, since: int) -> None:
        self._connection, self._batch, self._chains = connection, batch, chains
        self._source: ArchiveInput = chains.partition
        self._since = since
        self._start, self._at = row_start(self._source, batch.number), microseconds(batch.at)
        self._written = BatchResult(since)
        self._copy = _CopyStream(connection)
        self._seen: dict[tuple[int, int], int] = {}

    def write(self, pages: StreamPages) -> BatchResult:
        """Write the pages. Raises NodeNotArmed after another arming."""
        written = self._written
        place = {"partition_id": self._source.partition}
        row = self._connection.execute(query("archive_progress"), place).fetchone()
        if (row or (1, False)) != (self._since, False):
            written.moved = True
            return written
        failpoint("archive.before_copy")
        with closing(pages), self._copy:
            self._write_pages(pages)
        failpoint("archive.after_copy")
        # A replaced run's records may be lost, and their offsets assigned to others; likewise a run that was emptied
        # and armed again.
        armed = self._connection.execute(query("archive_run"), place).fetchone()
        if armed is None or armed != (pages.run_id, self._source.armed_at):
            raise NodeNotArmed(f"partition {self._source.partition}", "its node is armed anew: the next pass goes on")
        self._put_progress()
        self._put_marks()
        if written.records:
            self._batch.put(self._connection, records=written.records)
        written.batch = self._batch
        failpoint("archive.before_commit")
        return written

    def _write_pages(self, pages: StreamPages) -> None:
        written, count, size = self._written, 0, 0
        for entries in pages:
            if written.stopped:
                self._look_ahead(entries)
                size += sum(len(entry[1][-1]) for entry in entries)
            else:
                size += self._write_page(entries)
            count += len(entries)
            if count >= RECORDS or size >= BYTES:
                break
        written.more = pages.more

    def _write_page(self, entries: list[Entry]) -> int:
        at, size = 0, 0
        while at < len(entries) and not self._written.stopped:
            rows: list[bytes] = []
            at = self._chains.rows(entries, at, self._start, self._at, rows)
            if rows:
                data = b"".join(rows)
                self._copy.write(data)
                failpoint("archive.in_copy")
                # Each row is five pieces.
                self._written.records += len(rows) // 5
                size += len(data)
            if at < len(entries):
                at = self._decide(entries, at)
        if not self._written.stopped:
            self._written.upto = offset_of(entries[-1]) + 1
        return size

    def _decide(self, entries: list[Entry], at: int) -> int:
        entry = entries[at]
        self._copy.end()
        if is_command(entry):
            self._written.complete = entry[1][5].decode() == self._source.seal_id
            if self._written.complete:
                self._check_ends(offset_of(entry) + 1)
            return at + 1
        self._load(self._chains.unknown(entries[at:]))
        chain, seq = self._chains.known(entry)
        if chain.last in (seq - 1, NOTHING) or seq <= chain.last:
            return at
        return self._at_gap(chain, seq, entries, at)

    def _load(self, unknown: list[int]) -> None:
        if unknown:
            facts = {
                "topic_id": self._batch.topic_id,
                "sources": unknown,
                "lp_from": self._source.lp_from,
                "lp_to": self._source.lp_to,
            }
            self._chains.load(unknown, self._connection.execute(query("archive_marks"), facts).fetchall())

    def _check_ends(self, offset: int) -> None:
        """Stop if chains end below the seal's marks: no later record would show these gaps."""
        self._load(self._chains.missing())
        for chain, seq in self._chains.short():
            if not self._pass_gap(chain, seq + 1, offset):
                self._written.stopped, self._written.upto = True, offset

    def _at_gap(self, chain: LpChain, seq: int, entries: list[Entry], at: int) -> int:
        offset = offset_of(entries[at])
        if self._pass_gap(chain, seq, offset):
            return at
        self._written.stopped, self._written.upto = True, offset
        self._seen[chain.source, chain.lp] = seq
        self._look_ahead(entries[at + 1 :])
        return at

    def _pass_gap(self, chain: LpChain, seq: int, offset: int) -> bool:
        switched = chain.segment < self._batch.segment and chain.last == chain.stored
        accepted = switched or self._is_accepted(chain, seq)
        self._written.gaps.append(SeqGap(chain.source, chain.lp, chain.last, seq, offset, accepted))
        if accepted:
            chain.first, chain.last = seq, seq - 1
        return accepted

    def _is_accepted(self, chain: LpChain, seq: int) -> bool:
        facts = {
            "topic_id": self._batch.topic_id,
            "source": chain.source,
            "lp": chain.lp,
            "after": chain.last,
            "next": seq,
        }
        return self._connection.execute(query("archive_gap_accepted"), facts).fetchone() is not None

    def _look_ahead(self, entries: list[Entry]) -> None:
        for entry in entries:
            if is_command(entry):
                continue
            chain, seq = self._chains.met(entry)
            if chain is None or chain.last == NOTHING:
                continue
            pair = (chain.source, chain.lp)
            last = self._seen.get(pair, chain.last)
            if seq > last + 1 and pair not in self._seen:
                self._written.gaps.append(SeqGap(*pair, last, seq, offset_of(entry), accepted=False))
            self._seen[pair] = max(last, seq)

    def _put_progress(self) -> None:
        written = self._written
        written.complete = written.complete and not written.stopped
        facts = {
            "partition_id": self._source.partition,
            "topic_id": self._batch.topic_id,
            "upto": written.upto,
            "since": self._since,
            "complete": written.complete,
        }
        if self._connection.execute(query("archive_progress_put"), facts).fetchone() is None:
            raise NodeNotArmed(f"partition {self._source.partition}", "its node fell back while it was archived")

    def _put_marks(self) -> None:
        gaps, changed = self._written.gaps, self._chains.changed()
        if gaps:
            names = ("sources", "lps", "afters", "nexts", "offsets", "accepted")
            facts: dict[str, Any] = {name: [gap[number] for gap in gaps] for number, name in enumerate(names)}
            facts |= {"topic_id": self._batch.topic_id, "partition_id": self._source.partition}
            self._connection.execute(query("archive_gaps_put"), facts)
        if changed:
            facts = {
                "topic_id": self._batch.topic_id,
                "segment": self._batch.segment,
                "sources": [chain.source for chain in changed],
                "lps": [chain.lp for chain in changed],
                "firsts": [chain.first for chain in changed],
                "lasts": [chain.last for chain in changed],
            }
            self._connection.execute(query("archive_marks_put"), facts)


class _CopyStream:
    """A COPY. End it before other statements."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._open: tuple[AbstractContextManager[psycopg.Copy], psycopg.Copy] | None = None

    def write(self, rows: bytes) -> None:
        if self._open is None:
            manager = self._connection.cursor().copy(COPY)
            self._open = (manager, manager.__enter__())
            self._open[1].write(OPENING)
        self._open[1].write(rows)

    def end(self) -> None:
        if self._open is not None:
            (manager, copy), self._open = self._open, None
            copy.write(ENDING)
            manager.__exit__(None, None, None)

    def __enter__(self) -> _CopyStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.end()
        elif self._open is not None:
            (manager, _), self._open = self._open, None
            manager.__exit__(kind, error, trace)
