"""Export the archive into a lake, from where the lake stands: docs/design/lake.md."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mqlayer.archive.columns import ArchiveTable
from mqlayer.archive.lake.state import Lake, ensure_lake
from mqlayer.archive.lake.tables import TABLES, LakeTable, check_packages, lake_schema
from mqlayer.errors import ArchiveBroken, Conflict, InvalidInput, NotFound, TransactionConflict
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.arrow_reader import ReadAddress, arrow_batches, bound, read_address
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.postgres.session_lock import session_lock
from mqlayer.runtime.runtime import Runtime

if TYPE_CHECKING:
    import pyarrow as pa

log = event_logger(__name__)

APPLICATION: Final = "mqlayer export"
COMMIT_ROWS: Final = 500_000
COMMIT_BYTES: Final = 256_000_000
"""A commit has about as many records or bytes of bodies, and one batch of the archive at the least."""
GROUP_BYTES: Final = 16_000_000
GROUP_ROWS: Final = (100, 100_000)
"""Bounds of a row group, which bounds the memory of each open file."""
TRIES: Final = 5
QUERIES: Final[Mapping[ArchiveTable, str]] = {"records": "lake_records", "outcomes": "lake_outcomes"}


@dataclass(slots=True)
class LakeReport:
    """Result of an export: records per topic, commits, files that compaction replaced. `ended`: nothing is left."""

    exported: dict[str, int] = field(default_factory=dict)
    commits: int = 0
    compacted: int = 0
    ended: bool = True

    @property
    def total(self) -> int:
        """All exported records."""
        return sum(self.exported.values())


class _ExportTopic(NamedTuple):
    topic_id: int
    name: str
    batch: int
    kept_from: int | None


def export_archive(
    runtime: Runtime, location: str, *, topics: Sequence[str] | None = None, at_most_s: float | None = None
) -> LakeReport:
    """Append the batches that the lake lacks, each once, then compact small files.

    Safe to kill, and to run concurrently. Starts no commit after `at_most_s`. Raises NotFound, InvalidInput, Conflict
    for a place of another archive and for an object store to which another process exports, ArchiveBroken if days were
    dropped before, StoreUnavailable.
    """
    check_packages()
    wanted = _topics(runtime, topics)
    lake = ensure_lake(runtime, location)
    failpoint("lake.after_register")
    report = LakeReport()
    if "://" not in lake.location:
        tables = _append(runtime, lake, wanted, at_most_s, report, check=lambda: None)
        with _lock(runtime, lake) as check:
            if check is None:
                # Another exporter compacts meanwhile, or the next run.
                log.info("lake_not_compacted", extra={"reason": "another process has the lock"})
            else:
                _compact(tables, wanted, report, check)
        return report
    with _lock(runtime, lake) as check:
        if check is None:
            raise Conflict(f"another process exports to {lake.location}", "try again when it ended")
        tables = _append(runtime, lake, wanted, at_most_s, report, check=check)
        _compact(tables, wanted, report, check)
    return report


def _lock(runtime: Runtime, lake: Lake) -> AbstractContextManager[Callable[[], None] | None]:
    """Try the lock of compaction, and of all writes to an object store.

    delta-rs commits two compactions of the same files, which doubles their rows; some stores don't heed the condition
    of a commit.
    """
    facts = {"lake_id": lake.lake_id}
    return session_lock(runtime.control.dsn, "lake_lock", facts, purpose="an export", application=APPLICATION)


def _append(
    runtime: Runtime,
    lake: Lake,
    wanted: list[_ExportTopic],
    at_most_s: float | None,
    report: LakeReport,
    *,
    check: Callable[[], None],
) -> dict[ArchiveTable, LakeTable]:
    tables = {name: LakeTable(lake.location, name) for name in TABLES}
    for table in tables.values():
        table.create(lake.uuid)
        failpoint("lake.after_create")
    until = float("inf") if at_most_s is None else time.monotonic() + at_most_s
    address = read_address(runtime.control.dsn)
    for topic in wanted:
        _TopicExport(runtime, address, lake, tables, topic, report, check).run(until)
    if report.total:
        log.info("archive_exported", extra={"records": report.total, "commits": report.commits})
    return tables


def _compact(
    tables: dict[ArchiveTable, LakeTable], wanted: list[_ExportTopic], report: LakeReport, check: Callable[[], None]
) -> None:
    for table in tables.values():
        # Of the files as they are under the lock.
        table.refresh()
        check()
        gone = sum(_compacted(table, name) for name in {topic.name for topic in wanted})
        report.compacted += gone
        failpoint("lake.after_compact")
        if gone:
            table.vacuum()


def _topics(runtime: Runtime, names: Sequence[str] | None) -> list[_ExportTopic]:
    with runtime.control.connection() as connection:
        rows = connection.execute(query("lake_work"), {"topics": None if names is None else list(names)}).fetchall()
    if not rows:
        if names:
            raise NotFound("archived topic", ", ".join(names), "mqlayer archive status shows what there is")
        raise InvalidInput("no topic is archived: mqlayer topic set TOPIC --archived")
    return [_ExportTopic(*row) for row in rows]


def _compacted(table: LakeTable, topic: str) -> int:
    try:
        return table.compact(topic)
    except TransactionConflict as error:
        # Another exporter wrote meanwhile: the next run compacts.
        log.info("lake_not_compacted", extra={"table": table.name, "reason": str(error)})
        return 0


class _TopicExport:
    def __init__(
        self,
        runtime: Runtime,
        address: ReadAddress,
        lake: Lake,
        tables: dict[ArchiveTable, LakeTable],
        topic: _ExportTopic,
        report: LakeReport,
        check: Callable[[], None],
    ) -> None:
        self._runtime, self._address, self._lake, self._check = runtime, address, lake, check
        self._tables, self._topic, self._report = tables, topic, report

    def run(self, until: float) -> None:
        tries = 0
        while True:
            if time.monotonic() >= until:
                self._report.ended = False
                return
            try:
                if not self._commit():
                    return
                tries = 0
            except TransactionConflict:
                # Another exporter committed: go on from where the lake is now.
                tries += 1
                if tries == TRIES:
                    raise
                for table in self._tables.values():
                    table.refresh()

    def _commit(self) -> bool:
        topic = self._topic
        place = self._tables["records"].place(topic.topic_id)
        first = place + 1 if place else (topic.kept_from or topic.batch + 1)
        if place > topic.batch:
            raise ArchiveBroken(
                f"the export has batches up to {place} of topic {topic.name!r}, the archive up to {topic.batch}",
                "the archive was restored to an earlier time: export to a new place",
            )
        if place == topic.batch or first > topic.batch:
            self._note("lake_topic_put", place, first)
            return False
        if not place:
            # Before the first commit: the lake itself does not say where it began.
            self._note("lake_topic_begin", first - 1, first)
            failpoint("lake.after_begin")
        upto, width = self._chunk(first - 1)
        self._lineage()
        failpoint("lake.after_lineage")
        group_rows = min(max(GROUP_BYTES // max(width, 1), GROUP_ROWS[0]), GROUP_ROWS[1])
        outcomes = self._tables["outcomes"]
        since = max(outcomes.place(topic.topic_id), first - 1)
        if since < upto:
            outcomes.append(self._rows("outcomes", since, upto, []), topic.topic_id, upto, group_rows=GROUP_ROWS[1])
            failpoint("lake.after_outcomes")
        counted: list[int] = []
        records = self._rows("records", first - 1, upto, counted)
        self._tables["records"].append(records, topic.topic_id, upto, group_rows=group_rows)
        failpoint("lake.after_records")
        self._note("lake_topic_put", upto, first)
        self._report.commits += 1
        self._report.exported[topic.name] = self._report.exported.get(topic.name, 0) + sum(counted)
        failpoint("lake.after_note")
        return upto < topic.batch

    def _chunk(self, after: int) -> tuple[int, int]:
        """Return the last batch of the next commit, and a record's width."""
        facts: dict[str, Any] = {"topic_id": self._topic.topic_id, "after": after, "upto": self._topic.batch}
        with self._runtime.control.connection() as connection:
            ((width,),) = connection.execute(query("lake_width"), facts).fetchall()
            rows = max(1, min(COMMIT_ROWS, COMMIT_BYTES // max(width, 1)))
            row = connection.execute(query("lake_chunk"), facts | {"rows": rows}).fetchone()
        return (self._topic.batch if row is None else max(row[0] - 1, after + 1)), width

    def _rows(self, name: ArchiveTable, after: int, upto: int, counted: list[int]) -> Iterator[pa.RecordBatch]:
        from mqlayer.archive.arrow_types import formed

        schema = lake_schema(name)
        facts = {"topic_id": self._topic.topic_id, "after": after, "upto": upto}
        # In the reading transaction: none of these batches was dropped, nor will be.
        statements = [bound("stream_there", facts), bound(QUERIES[name], facts)]
        with arrow_batches(self._address, statements, application=APPLICATION) as batches:
            for batch in batches:
                counted.append(batch.num_rows)
                yield formed(_with_day(batch), schema)
                failpoint("lake.in_write")
        # The commit follows.
        self._check()

    def _lineage(self) -> None:
        """Bring the topic's partitions up to date, where a route changed."""
        import pyarrow as pa

        from mqlayer.archive.arrow_types import formed

        table, schema = self._tables["lineage"], lake_schema("lineage")
        statement = bound("lake_lineage", {"topic_id": self._topic.topic_id})
        with arrow_batches(self._address, [statement], application=APPLICATION) as batches:
            now = pa.Table.from_batches([formed(batch, schema) for batch in batches], schema=schema)
        stored = table.delta.to_pyarrow_table(filters=[("topic_id", "=", self._topic.topic_id)])
        if _sorted_rows(now) != _sorted_rows(stored):
            self._check()
            version = max((row["last_version"] for row in now.to_pylist()), default=0)
            table.replace(now, self._topic.topic_id, version)
            table.refresh()

    def _note(self, name: str, place: int, first: int) -> None:
        """Bring Postgres up to the lake."""
        facts = {"lake_id": self._lake.lake_id, "topic_id": self._topic.topic_id, "first_batch": first, "batch": place}
        self._runtime.control.transaction(partial(_note, name=name, facts=facts))


def _note(connection: Connection, name: str, facts: dict[str, int]) -> None:
    connection.execute(query(name), facts)


def _with_day(batch: pa.RecordBatch) -> pa.RecordBatch:
    import pyarrow as pa
    import pyarrow.compute as pc

    # In UTC, as the archive's days.
    return batch.append_column("day", pc.cast(batch.column("archived_at"), pa.date32()))


def _sorted_rows(table: pa.Table) -> list[str]:
    return sorted(str(sorted(row.items())) for row in table.to_pylist())
