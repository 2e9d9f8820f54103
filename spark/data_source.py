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
from mqlayer.archive.read_ranges import batches_condition
from mqlayer.archive.snapshots import find_snapshot, is_whole, shares_of
from mqlayer.domain.routing import LP_COUNT
from mqlayer.errors import InvalidInput
from mqlayer.postgres.arrow_reader import ReadAddress, arrow_batches, bound
from mqlayer.postgres.database import Database
from mqlayer.spark.schemas import declared

if TYPE_CHECKING:
    import pyarrow as pa

APPLICATION: Final = "mqlayer spark"
DEFAULT_PARTITIONS: Final = 4
BATCH_OPTIONS: Final = ("snapshot", "table", "columns", "partitions")


@dataclass(frozen=True)
class SnapshotPart(InputPartition):
    """A task's rows."""

    statement: str
    condition: str


class ArchiveSource(DataSource):
    """Options: `snapshot`, `table`, `columns` (by commas), `partitions`."""

    address: ClassVar[ReadAddress]

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self.table: ArchiveTable = check_table(options.get("table", "records"))
        named = options.get("columns")
        self.columns = chosen_columns(self.table, [part.strip() for part in named.split(",")] if named else None)
        self.parts = positive_number(options, "partitions", DEFAULT_PARTITIONS)
        self.snapshot_id: int | None = None
        if "snapshot" in options:
            check_options(options, BATCH_OPTIONS)
            # Resolved once: the frame keeps this snapshot, and fails once it is dropped.
            with Database(self.address.conninfo(application=APPLICATION)) as database:
                self.snapshot_id = find_snapshot(database, options["snapshot"]).snapshot_id

    @classmethod
    def name(cls) -> str:
        """Return the format."""
        return "mqlayer"

    def schema(self) -> StructType:
        """Return the chosen columns."""
        return declared(self.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a snapshot's reader."""
        if self.snapshot_id is None:
            raise InvalidInput("option snapshot: name the snapshot to read; mqlayer snapshot list shows them")
        # No filter pushdown: Spark reuses a reader, with one query's filters, for the frame's next query.
        return SnapshotReader(self.address, self.snapshot_id, self.table, schema, self.parts)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return a stream's reader."""
        from mqlayer.spark.archive_stream import ArchiveStreamReader, growth_options

        if self.table == "lineage":
            raise InvalidInput("option table: lineage does not stream; choose records or outcomes")
        return ArchiveStreamReader(self.address, growth_options(self.options), self.table, schema, self.parts)


class SnapshotReader(DataSourceReader):
    """Reads a snapshot in parts."""

    def __init__(
        self, address: ReadAddress, snapshot_id: int, table: ArchiveTable, schema: StructType, parts: int
    ) -> None:
        self._address, self._snapshot_id, self._table, self._schema = address, snapshot_id, table, schema
        self._parts = parts

    def partitions(self) -> Sequence[InputPartition]:
        """Return parts of similar size."""
        with Database(self._address.conninfo(application=APPLICATION)) as database:
            statement, conditions = parts_of(database, self._snapshot_id, self._table, self._parts)
        return [SnapshotPart(statement, condition) for condition in conditions]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a part in one transaction."""
        if not isinstance(partition, SnapshotPart):
            return
        there = bound("snapshot_there", {"snapshot_id": self._snapshot_id})
        statement = f"{chosen(partition.statement, self._schema)} WHERE {partition.condition}"
        yield from read_batches(self._address, [there, statement], self._schema)


def parts_of(database: Database, snapshot_id: int, table: ArchiveTable, count: int) -> tuple[str, list[str]]:
    """Return a table's statement, and conditions that divide its rows."""
    whole = table == "records" and is_whole(database, snapshot_id)
    facts = {"snapshot_id": snapshot_id, "lp_from": 0, "lp_to": LP_COUNT}
    statement = bound(WHOLE_QUERY if whole else SNAPSHOT_QUERIES[table], facts)
    if table == "lineage":
        return statement, ["true"]
    # Outcomes have batches between those of the records.
    return statement, [batches_condition(share) for share in shares_of(database, snapshot_id, count)] or ["false"]


def read_batches(address: ReadAddress, statements: Sequence[str], schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield the last statement's rows in this schema."""
    from pyspark.sql.pandas.types import to_arrow_schema

    from mqlayer.archive.arrow_types import formed

    wanted = to_arrow_schema(schema, timezone="UTC")
    with arrow_batches(address, statements, application=APPLICATION) as batches:
        for batch in batches:
            yield formed(batch, wanted)


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
