"""Snapshots read across a lake and Postgres: batches that the lake has from there, all others from Postgres."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

from mqlayer.archive.columns import SNAPSHOT_QUERIES, ArchiveTable, check_table, chosen_columns
from mqlayer.archive.lake.tables import LakeTable, check_packages, lake_errors
from mqlayer.archive.read_ranges import BatchRange, batches_condition
from mqlayer.archive.snapshots import Snapshot, find_snapshot, snapshot_ranges, there_statement
from mqlayer.domain.routing import LP_COUNT
from mqlayer.errors import ArchiveBroken, NotFound
from mqlayer.postgres.arrow_reader import arrow_batches, bound, read_address
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

if TYPE_CHECKING:
    import pyarrow as pa

APPLICATION: Final = "mqlayer read"
ROWS: Final = 20_000
"""Rows of a lake's file in memory, of each of a few files."""


class LakePart(NamedTuple):
    """Batches of a snapshot's topic that a lake has, both ends included; `last`: the snapshot's last."""

    topic_id: int
    topic: str
    first: int
    upto: int
    last: int

    @property
    def from_lake(self) -> BatchRange:
        """Return those batches."""
        return BatchRange(self.topic_id, self.first - 1, max(self.upto, self.first - 1))

    @property
    def from_postgres(self) -> tuple[BatchRange, ...]:
        """Return all others."""
        _, after, upto = self.from_lake
        ranges = BatchRange(self.topic_id, 0, min(after, self.last)), BatchRange(self.topic_id, upto, self.last)
        return tuple(one for one in ranges if one.after < one.upto)


@dataclass(frozen=True, slots=True)
class LakeSnapshot:
    """A snapshot, and the batches that come from a lake's table."""

    snapshot: Snapshot
    table: LakeTable
    parts: tuple[LakePart, ...]

    @property
    def exported(self) -> dict[int, int]:
        """Return the lake's last batch by topic."""
        return {part.topic_id: part.upto for part in self.parts}

    @property
    def rest(self) -> list[BatchRange]:
        """Return the other batches."""
        return [one for part in self.parts for one in part.from_postgres]


def lake_snapshot(database: Database, found: Snapshot, location: str, table: ArchiveTable) -> LakeSnapshot:
    """Divide a snapshot between a lake and Postgres.

    Raises NotFound, InvalidInput, ArchiveBroken if another export has days of it that only exports have.
    """
    check_packages()
    opened = LakeTable(location, table)
    facts = {"snapshot_id": found.snapshot_id, "uuid": opened.owner}
    with database.connection() as connection:
        if connection.execute(query("lake_by_uuid"), facts).fetchone() is None:
            raise NotFound("export", location, "it is of another archive: mqlayer archive exports shows this one's")
        rows = connection.execute(query("lake_snapshot"), facts).fetchall()
    parts = []
    for topic_id, topic, batch, first, exported, elsewhere in rows:
        if exported and (first is None or first > exported or elsewhere):
            raise ArchiveBroken(
                f"days of snapshot {found.name!r} are in another export only",
                "read it with that one: mqlayer archive exports shows all",
            )
        # A commit of the lake is there before Postgres knows of it.
        upto = 0 if first is None else min(opened.place(topic_id), batch)
        parts.append(LakePart(topic_id, topic, first or 1, upto, batch))
    return LakeSnapshot(found, opened, tuple(parts))


def read_snapshot(
    database: Database,
    name: str,
    *,
    table: ArchiveTable = "records",
    columns: Sequence[str] | None = None,
    export: str | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield a snapshot's records, outcomes or lineage, as Spark reads them; `export`: an export's location.

    Memory: a few batches. Raises NotFound, InvalidInput, ArchiveBroken if a record of the cut is missing.
    """
    known = check_table(table)
    chosen = chosen_columns(known, None if columns is None else list(columns))
    found = find_snapshot(database, name)
    if export is None:
        yield from _counted(_from_postgres(database, found, known, chosen, {}, None), found, known)
        return
    if known == "lineage":
        # Postgres keeps the lineage of all that was ever archived; the records say which days may be gone.
        divided = lake_snapshot(database, found, export, "records")
        yield from _from_postgres(database, divided.snapshot, known, chosen, divided.exported, None)
        return
    divided = lake_snapshot(database, found, export, known)

    def rows() -> Iterator[pa.RecordBatch]:
        for part in divided.parts:
            if part.upto >= part.first:
                cut = cut_of(database, found.snapshot_id, part.topic_id) if known == "records" else None
                yield from lake_rows(divided.table, part, chosen, cut)
        if divided.rest:
            yield from _from_postgres(database, divided.snapshot, known, chosen, divided.exported, divided.rest)

    yield from _counted(rows(), divided.snapshot, known)


def _counted(batches: Iterator[pa.RecordBatch], snapshot: Snapshot, table: ArchiveTable) -> Iterator[pa.RecordBatch]:
    count = 0
    for batch in batches:
        count += batch.num_rows
        yield batch
    if table == "records" and count != snapshot.records:
        raise ArchiveBroken(
            f"snapshot {snapshot.name!r} has {snapshot.records} records, {count} were read",
            f"use nothing of this reading: mqlayer snapshot show {snapshot.name} --verify looks at the archive",
        )


def _from_postgres(
    database: Database,
    snapshot: Snapshot,
    table: ArchiveTable,
    columns: Mapping[str, str],
    exported: Mapping[int, int],
    ranges: Sequence[BatchRange] | None,
) -> Iterator[pa.RecordBatch]:
    from mqlayer.archive.arrow_types import arrow_schema, formed

    schema = arrow_schema(columns)
    facts = {"snapshot_id": snapshot.snapshot_id, "lp_from": 0, "lp_to": LP_COUNT}
    names = ", ".join(f'"{name}"' for name in columns)
    condition = "true" if ranges is None else batches_condition(ranges)
    inner = bound(SNAPSHOT_QUERIES[table], facts)
    statement = f"SELECT {names} FROM ({inner}) AS read WHERE {condition}"  # noqa: S608 - names and numbers of ours
    statements = [there_statement(snapshot.snapshot_id, exported), statement]
    with arrow_batches(read_address(database.dsn), statements, application=APPLICATION) as batches:
        for batch in batches:
            yield formed(batch, schema)


def lake_rows(
    table: LakeTable,
    part: LakePart,
    columns: Mapping[str, str],
    cut: pa.Table | None,
    *,
    files: Collection[str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the part's rows in the cut, of `files` only."""
    import pyarrow as pa

    from mqlayer.archive.arrow_types import arrow_schema

    schema, needed = arrow_schema(columns), set() if cut is None else {"source", "lp", "seq"}
    with lake_errors(table.location):
        rows = table.rows_of(part.topic)
        options = {
            "columns": [*columns, *sorted(needed - set(columns))],
            "filter": batches_wanted(part.topic_id, part.first, part.upto),
            "batch_size": ROWS,
            "batch_readahead": 2,
            "fragment_readahead": 1,
        }
        if files is None:
            scanners = [rows.scanner(**options)]
        else:
            wanted = [one for one in rows.get_fragments() if one.path in files]
            scanners = [one.scanner(schema=rows.schema, **options) for one in wanted]
        for scanner in scanners:
            for batch in scanner.to_batches():
                kept = batch if cut is None else in_cut(batch, cut)
                if kept.num_rows:
                    chosen = [kept.column(name).cast(schema.field(name).type) for name in columns]
                    yield pa.RecordBatch.from_arrays(chosen, schema=schema)


def lake_files(table: LakeTable, part: LakePart) -> dict[str, int]:
    """Return the part's files with their rows."""
    wanted = batches_wanted(part.topic_id, part.first, part.upto)
    # The log has paths with what addresses escape.
    counts = {unquote(file["path"]): int(file["num_records"] or 0) for file in table.files(part.topic)}
    with lake_errors(table.location):
        return {one.path: counts[one.path] for one in table.rows_of(part.topic).get_fragments(wanted)}


def batches_wanted(topic_id: int, first: int, upto: int) -> pa.dataset.Expression:
    """Return the condition of a topic's batches, both ends included."""
    import pyarrow.compute as pc

    batch = pc.field("batch")
    return (pc.field("topic_id") == topic_id) & (batch >= first) & (batch <= upto)


def cut_of(database: Database, snapshot_id: int, topic_id: int) -> pa.Table:
    """Return a snapshot's seqs of a topic per source and LP."""
    import pyarrow as pa

    rows = [one[1:] for one in snapshot_ranges(database, snapshot_id) if one[0] == topic_id]
    names = ("source", "lp", "first", "last")
    types = (pa.int64(), pa.int32(), pa.int64(), pa.int64())
    return pa.table({name: pa.array([row[at] for row in rows], type=types[at]) for at, name in enumerate(names)})


def in_cut(batch: pa.RecordBatch, cut: pa.Table) -> pa.RecordBatch:
    """Return the rows whose seq the cut has."""
    import pyarrow as pa
    import pyarrow.compute as pc

    # Joins take no maps and lists: only the rows' numbers are joined.
    keys = pa.table([batch.column("source"), batch.column("lp"), batch.column("seq")], names=["source", "lp", "seq"])
    keys = keys.append_column("at", pa.array(range(batch.num_rows), type=pa.int64()))
    joined = keys.join(cut, keys=["source", "lp"], join_type="inner")
    inside = pc.and_(pc.greater_equal(joined["seq"], joined["first"]), pc.less_equal(joined["seq"], joined["last"]))
    numbers = joined.filter(inside).sort_by("at")["at"]
    return batch.take(pa.concat_arrays(numbers.chunks) if numbers.num_chunks else pa.array([], type=pa.int64()))
