"""The data source `mqlayer`: the archive by Arrow, without a jar; batch reads of snapshots, and streams of what grows.

Its class is bound to a database when it is registered, and pickled with it into Python workers: options are part of
plans, so no address is ever one of them.
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
    """What one task reads: rows of a statement."""

    statement: str
    condition: str


class ArchiveSource(DataSource):
    """What Spark asks for a reader. Options: `snapshot`, `table`, `columns` (divided by commas), `partitions`."""

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
            # Found once: a frame goes on to mean this snapshot, or fails once it is dropped.
            with Database(self.address.conninfo(application=APPLICATION)) as database:
                self.snapshot_id = find_snapshot(database, options["snapshot"]).snapshot_id

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "mqlayer"

    def schema(self) -> StructType:
        """The declared columns that were chosen."""
        return declared(self.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a snapshot."""
        if self.snapshot_id is None:
            raise InvalidInput("option snapshot: name the snapshot to read; mqlayer snapshot list shows them")
        # No filters are pushed down: Spark keeps a reader with those of one query for the next one on the same frame.
        return SnapshotReader(self.address, self.snapshot_id, self.table, schema, self.parts)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader of what the archive takes in."""
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
        """Return parts with about as many records each."""
        with Database(self._address.conninfo(application=APPLICATION)) as database:
            statement, conditions = parts_of(database, self._snapshot_id, self._table, self._parts)
        return [SnapshotPart(statement, condition) for condition in conditions]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the batches of Arrow of a part, read in one transaction."""
        if not isinstance(partition, SnapshotPart):
            return
        there = bound("snapshot_there", {"snapshot_id": self._snapshot_id})
        statement = f"{chosen(partition.statement, self._schema)} WHERE {partition.condition}"
        yield from read_batches(self._address, [there, statement], self._schema)


def parts_of(database: Database, snapshot_id: int, table: ArchiveTable, count: int) -> tuple[str, list[str]]:
    """Return the statement that reads a table of a snapshot, and the conditions that divide its rows among readers."""
    whole = table == "records" and is_whole(database, snapshot_id)
    facts = {"snapshot_id": snapshot_id, "lp_from": 0, "lp_to": LP_COUNT}
    statement = bound(WHOLE_QUERY if whole else SNAPSHOT_QUERIES[table], facts)
    if table == "lineage":
        return statement, ["true"]
    # Outcomes have batches between those of the records.
    return statement, [batches_condition(share) for share in shares_of(database, snapshot_id, count)] or ["false"]


def read_batches(address: ReadAddress, statements: Sequence[str], schema: StructType) -> Iterator[pa.RecordBatch]:
    """Return what the last statement answers, in the columns of this schema."""
    from pyspark.sql.pandas.types import to_arrow_schema

    from mqlayer.archive.arrow_types import formed

    wanted = to_arrow_schema(schema, timezone="UTC")
    with arrow_batches(address, statements, application=APPLICATION) as batches:
        for batch in batches:
            yield formed(batch, wanted)


def chosen(statement: str, schema: StructType) -> str:
    """Return a statement for these columns of another one's answer."""
    columns = ", ".join(f'"{name}"' for name in schema.fieldNames())
    return f"SELECT {columns} FROM ({statement}) AS read"  # noqa: S608 - the names are declared ones


def check_options(options: Mapping[str, str], known: Sequence[str]) -> None:
    """Raise InvalidInput for an option that means nothing here. It is named, its value is not."""
    for name in options:
        if name.lower() not in known:
            hint = "it would be seen in plans; give it to mqlayer.spark.register" if name.lower() == "dsn" else (
                f"there are {', '.join(known)}"
            )  # fmt: skip
            raise InvalidInput(f"option {name}: unknown here: {hint}")


def positive_number(options: Mapping[str, str], name: str, default: int) -> int:
    """Return an option that is a number of 1 or more. Raises InvalidInput."""
    given = options.get(name)
    if given is None:
        return default
    if not given.strip().isdecimal() or int(given) < 1:
        raise InvalidInput(f"option {name}: {given!r} is no whole number of 1 or more")
    return int(given)


def bound_source(address: ReadAddress, *, called: str = "mqlayer") -> type[ArchiveSource]:
    """Return a class of its own that knows its database; pickled by value, being made here, so workers get both."""

    class BoundSource(ArchiveSource):
        @classmethod
        def name(cls) -> str:
            return called

    BoundSource.address = address
    return BoundSource
