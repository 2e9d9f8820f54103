"""The data source `mqlayer`: snapshots and streams of the archive, by Arrow, without a jar.

The class is bound to a database and pickled into workers. Options are part of plans, so they hold no address.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from mqlayer.archive.columns import SNAPSHOT_QUERIES, WHOLE_QUERY, ArchiveTable, check_table, chosen_columns
from mqlayer.archive.lake.reading import LakePart, LakeSnapshot, cut_of, lake_files, lake_rows, lake_snapshot
from mqlayer.archive.lake.tables import LakeTable, check_packages
from mqlayer.archive.read_ranges import BatchRange, batches_condition, common_batches
from mqlayer.archive.snapshots import Snapshot, find_snapshot, is_whole, shares_of, there_statement
from mqlayer.domain.routing import LP_COUNT
from mqlayer.errors import InvalidInput
from mqlayer.postgres.arrow_reader import ReadAddress, arrow_batches, bound
from mqlayer.postgres.database import Database
from mqlayer.spark.schemas import declared

if TYPE_CHECKING:
    import pyarrow as pa

APPLICATION: Final = "mqlayer spark"
DEFAULT_PARTITIONS: Final = 4
BATCH_OPTIONS: Final = ("snapshot", "table", "columns", "partitions", "export")


@dataclass(frozen=True)
class SnapshotPart(InputPartition):
    """A task's rows in Postgres, behind the statement `there`."""

    there: str
    statement: str
    condition: str


@dataclass(frozen=True)
class LakeFiles(InputPartition):
    """A task's files of a table's version."""

    location: str
    version: int
    part: LakePart
    files: frozenset[str]


class ArchiveSource(DataSource):
    """Options: `snapshot`, `table`, `columns` (by commas), `partitions`, `export`."""

    address: ClassVar[ReadAddress]

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self.table: ArchiveTable = check_table(options.get("table", "records"))
        named = options.get("columns")
        self.columns = chosen_columns(self.table, [part.strip() for part in named.split(",")] if named else None)
        self.parts = positive_number(options, "partitions", DEFAULT_PARTITIONS)
        self.snapshot: Snapshot | None = None
        if "snapshot" in options:
            check_options(options, BATCH_OPTIONS)
            # Resolved once: the frame keeps this snapshot, and fails once it is dropped.
            with Database(self.address.conninfo(application=APPLICATION)) as database:
                self.snapshot = find_snapshot(database, options["snapshot"])

    @classmethod
    def name(cls) -> str:
        """Return the format."""
        return "mqlayer"

    def schema(self) -> StructType:
        """Return the chosen columns."""
        return declared(self.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a snapshot's reader."""
        if self.snapshot is None:
            raise InvalidInput("option snapshot: name the snapshot to read; mqlayer snapshot list shows them")
        # No filter pushdown: Spark reuses a reader, with one query's filters, for the frame's next query.
        export = self.options.get("export")
        return SnapshotReader(self.address, self.snapshot, self.table, schema, self.parts, export)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return a stream's reader."""
        from mqlayer.spark.archive_stream import ArchiveStreamReader, growth_options

        if self.table == "lineage":
            raise InvalidInput("option table: lineage does not stream; choose records or outcomes")
        return ArchiveStreamReader(self.address, growth_options(self.options), self.table, schema, self.parts)


class SnapshotReader(DataSourceReader):
    """Reads a snapshot in parts."""

    def __init__(
        self,
        address: ReadAddress,
        snapshot: Snapshot,
        table: ArchiveTable,
        schema: StructType,
        parts: int,
        export: str | None,
    ) -> None:
        self._address, self._snapshot, self._table, self._schema = address, snapshot, table, schema
        self._parts, self._export = parts, export

    def partitions(self) -> Sequence[InputPartition]:
        """Return parts of similar size."""
        snapshot_id, exported, rest = self._snapshot.snapshot_id, dict[int, int](), None
        found: list[InputPartition] = []
        with self._database() as database:
            if self._export is not None:
                # Postgres keeps all lineage; the records say which days may be gone.
                of = "records" if self._table == "lineage" else self._table
                divided = lake_snapshot(database, self._snapshot, self._export, of)
                exported = divided.exported
                if self._table != "lineage":
                    found, rest = lake_parts(divided, self._export, self._parts), divided.rest
            statement, conditions = parts_of(database, snapshot_id, self._table, self._parts, rest)
        there = there_statement(snapshot_id, exported)
        return [*found, *(SnapshotPart(there, statement, condition) for condition in conditions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a part, Postgres' in one transaction."""
        if isinstance(partition, LakeFiles):
            yield from self._from_lake(partition)
        elif isinstance(partition, SnapshotPart):
            statement = f"{chosen(partition.statement, self._schema)} WHERE {partition.condition}"
            yield from read_batches(self._address, [partition.there, statement], self._schema)

    def _from_lake(self, task: LakeFiles) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        check_packages("on the workers too")
        wanted, cut = arrow_form(self._schema), None
        table = LakeTable(task.location, self._table, version=task.version)
        if self._table == "records":
            with self._database() as database:
                cut = cut_of(database, self._snapshot.snapshot_id, task.part.topic_id)
        columns = chosen_columns(self._table, self._schema.fieldNames())
        for batch in lake_rows(table, task.part, columns, cut, files=task.files):
            arrays = [column.cast(field.type) for column, field in zip(batch.columns, wanted, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=wanted)

    def _database(self) -> Database:
        return Database(self._address.conninfo(application=APPLICATION))


def lake_parts(divided: LakeSnapshot, location: str, count: int) -> list[InputPartition]:
    """Return about `count` equal tasks for the files."""
    tables = [(part, lake_files(divided.table, part)) for part in divided.parts if part.upto >= part.first]
    most = -(-sum(sum(files.values()) for _, files in tables) // count)
    version = divided.table.delta.version()
    found: list[InputPartition] = []
    for part, files in tables:
        taken, rows = list[str](), 0
        for path, records in sorted(files.items()):
            if taken and rows + records > most:
                found.append(LakeFiles(location, version, part, frozenset(taken)))
                taken, rows = [], 0
            taken.append(path)
            rows += records
        if taken:
            found.append(LakeFiles(location, version, part, frozenset(taken)))
    return found


def parts_of(
    database: Database, snapshot_id: int, table: ArchiveTable, count: int, rest: Sequence[BatchRange] | None = None
) -> tuple[str, list[str]]:
    """Return a table's statement, and conditions that divide its rows. `rest`: only these batches."""
    whole = table == "records" and is_whole(database, snapshot_id)
    facts = {"snapshot_id": snapshot_id, "lp_from": 0, "lp_to": LP_COUNT}
    statement = bound(WHOLE_QUERY if whole else SNAPSHOT_QUERIES[table], facts)
    if table == "lineage":
        return statement, ["true"]
    # Outcomes have batches between those of the records.
    shares = shares_of(database, snapshot_id, count)
    if rest is not None:
        shares = [common for share in shares if (common := common_batches(share, rest))]
    return statement, [batches_condition(share) for share in shares] or ["false"]


def read_batches(address: ReadAddress, statements: Sequence[str], schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield the last statement's rows in this schema."""
    from mqlayer.archive.arrow_types import formed

    wanted = arrow_form(schema)
    with arrow_batches(address, statements, application=APPLICATION) as batches:
        for batch in batches:
            yield formed(batch, wanted)


def arrow_form(schema: StructType) -> pa.Schema:
    """Return the Arrow schema of a source's rows."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def chosen(statement: str, schema: StructType) -> str:
    """Return a statement for the schema's columns."""
    columns = ", ".join(f'"{name}"' for name in schema.fieldNames())
    return f"SELECT {columns} FROM ({statement}) AS read"  # noqa: S608 - the names are declared ones


def check_options(options: Mapping[str, str], known: Sequence[str]) -> None:
    """Raise InvalidInput for unknown options, without their values."""
    for name in options:
        if name.lower() not in known:
            hint = "it would be seen in plans; give it to mqlayer.spark.register" if name.lower() == "dsn" else (
                f"there are {', '.join(known)}"
            )  # fmt: skip
            raise InvalidInput(f"option {name}: unknown here: {hint}")


def positive_number(options: Mapping[str, str], name: str, default: int) -> int:
    """Return an option of 1 or more. Raises InvalidInput."""
    given = options.get(name)
    if given is None:
        return default
    if not given.strip().isdecimal() or int(given) < 1:
        raise InvalidInput(f"option {name}: {given!r} is no whole number of 1 or more")
    return int(given)


def bound_source(address: ReadAddress, *, called: str = "mqlayer") -> type[ArchiveSource]:
    """Return a class bound to a database; being local, it is pickled by value."""

    class BoundSource(ArchiveSource):
        @classmethod
        def name(cls) -> str:
            return called

    BoundSource.address = address
    return BoundSource
