"""Delta tables of a lake: `records`, `outcomes`, `lineage`.

Each append is one commit of the table's log with the topic's new place (an application transaction of Delta), so a
repeated or concurrent append of the same batches is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from mqlayer.archive.columns import COLUMNS, ArchiveTable
from mqlayer.errors import Conflict, InvalidInput, MqlayerError, StoreUnavailable, TransactionConflict
from mqlayer.redaction import redact, register_secrets

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

EXTRA: Final[Mapping[ArchiveTable, Mapping[str, str]]] = {
    "records": {"topic_id": "int", "day": "date"},
    "outcomes": {"topic_id": "int", "batch": "bigint", "archived_at": "timestamp", "day": "date"},
    "lineage": {"topic_id": "int"},
}
"""Columns besides the archive's."""
PARTITIONED: Final[Mapping[ArchiveTable, Sequence[str]]] = {
    "records": ("topic", "day", "partition"),
    "outcomes": ("topic", "day", "partition"),
    "lineage": ("topic",),
}
TABLES: Final[tuple[ArchiveTable, ...]] = ("lineage", "outcomes", "records")
"""In the order of their commits: records come last."""
FILE_BYTES: Final = 128_000_000
"""Target of compaction."""
SMALL_FILES: Final = 8
"""A day's partition with as many files is compacted."""
KEPT: Final = timedelta(days=7)
"""Files that compaction replaced stay this long, for readers."""
CREDENTIALS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
MARK: Final = "mqlayer archive "
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
PACKAGES: Final = "exports to a lake need more packages: pip install 'mqlayer[lake]'"


def check_packages(purpose: str = "") -> None:
    """Raise InvalidInput without the extra; the error names the purpose."""
    try:
        import deltalake  # noqa: F401 - whether it is there
        import pyarrow.dataset  # noqa: F401
    except ImportError:
        raise InvalidInput(f"{PACKAGES}, {purpose}" if purpose else PACKAGES) from None


def lake_columns(table: ArchiveTable) -> dict[str, str]:
    """Return all columns of a lake's table."""
    return {**COLUMNS[table], **EXTRA[table]}


def lake_schema(table: ArchiveTable) -> pa.Schema:
    """Return a table's Arrow schema."""
    import pyarrow as pa

    from mqlayer.archive.arrow_types import arrow_schema

    plain = {name: word for name, word in lake_columns(table).items() if word != "date"}
    days = [pa.field(name, pa.date32()) for name, word in lake_columns(table).items() if word == "date"]
    return pa.schema([*arrow_schema(plain), *days])


def storage_options(location: str) -> dict[str, str]:
    """Return the options of an object store beside the AWS_… variables, which delta-rs reads itself."""
    if not location.startswith(("s3://", "s3a://")):
        return {}
    # Stores repeat a key id in their answers.
    register_secrets(*map(os.environ.get, CREDENTIALS))
    found: dict[str, str] = {}
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("MQLAYER_S3_ENDPOINT")
    if endpoint:
        found |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": str(endpoint.startswith("http://")).lower()}
    if not os.environ.get("AWS_REGION") and os.environ.get("MQLAYER_S3_REGION"):
        found["AWS_REGION"] = os.environ["MQLAYER_S3_REGION"]
    # A commit is one conditional put: no table of locks beside the store.
    return {"aws_conditional_put": "etag"} | found


def app_of(topic_id: int) -> str:
    """Return a topic's name in the tables' logs."""
    return f"mqlayer/{topic_id}"


class LakeTable:
    """One Delta table, as it was when it was opened, or at a version."""

    def __init__(self, location: str, name: ArchiveTable, *, version: int | None = None) -> None:
        self.location, self.name, self._version = location, name, version
        self._address, self._options = f"{location}/{name}", storage_options(location)
        self._table = self._open()

    def _open(self) -> DeltaTable | None:
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        with lake_errors(self.location):
            try:
                return DeltaTable(self._address, version=self._version, storage_options=self._options)
            except TableNotFoundError:
                return None

    @property
    def exists(self) -> bool:
        """Whether the table is there."""
        return self._table is not None

    @property
    def delta(self) -> DeltaTable:
        """The table. Raises InvalidInput where it is not there."""
        if self._table is None:
            raise InvalidInput(f"no export of the archive is at {self.location}")
        return self._table

    @property
    def owner(self) -> str:
        """The uuid of the export that made it."""
        return (self.delta.metadata().description or "").removeprefix(MARK)

    def create(self, uuid: str) -> None:
        """Make the table where it is not there. Raises Conflict for another export's."""
        from deltalake import DeltaTable

        if self._table is None:
            with lake_errors(self.location):
                DeltaTable.create(
                    self._address,
                    schema=lake_schema(self.name),
                    mode="ignore",
                    partition_by=list(PARTITIONED[self.name]),
                    description=f"{MARK}{uuid}",
                    storage_options=self._options,
                )
            self._table = self._open()
        if self.owner != uuid:
            raise Conflict(
                f"the tables at {self.location} are another export's",
                "name a place of its own; an export that was forgotten does not go on",
            )

    def refresh(self) -> None:
        """See later commits."""
        with lake_errors(self.location):
            self.delta.update_incremental()

    def place(self, topic_id: int) -> int:
        """Return the last batch of a topic; 0 if there is none."""
        return self.delta.transaction_version(app_of(topic_id)) or 0

    def append(self, batches: Iterator[pa.RecordBatch], topic_id: int, upto: int, *, group_rows: int) -> None:
        """Append rows, and set the topic's place, in one commit. Raises TransactionConflict if another process did."""
        import pyarrow as pa

        failed: list[BaseException] = []
        reader = pa.RecordBatchReader.from_batches(lake_schema(self.name), _watched(batches, failed))
        self._write(reader, topic_id, upto, failed, mode="append", group_rows=group_rows)

    def replace(self, rows: pa.Table, topic_id: int, version: int) -> None:
        """Replace a topic's rows, in one commit."""
        predicate = f"topic_id = {topic_id}"
        self._write(rows, topic_id, version, [], mode="overwrite", predicate=predicate, group_rows=100_000)

    def _write(
        self, rows: Any, topic_id: int, place: int, failed: list[BaseException], *, group_rows: int, **how: Any
    ) -> None:
        from deltalake import CommitProperties, Transaction, WriterProperties, write_deltalake

        known = {field.name for field in self.delta.schema().fields}
        if known != set(rows.schema.names):
            # Of another release: columns that one of both lacks are null.
            how["schema_mode"] = "merge"
        try:
            with lake_errors(self.location):
                write_deltalake(
                    self.delta,
                    rows,
                    writer_properties=WriterProperties(compression="ZSTD", max_row_group_size=group_rows),
                    commit_properties=CommitProperties(app_transactions=[Transaction(app_of(topic_id), place)]),
                    **how,
                )
        except MqlayerError as error:
            raise (failed[0] if failed else error) from None
        self.refresh()

    def files(self, topic: str) -> list[dict[str, Any]]:
        """Return a topic's files: path, size_bytes, num_records, least and greatest batch, day, partition."""
        import pyarrow as pa
        import pyarrow.compute as pc

        with lake_errors(self.location):
            found = pa.table(self.delta.get_add_actions(flatten=True))
        return list(found.filter(pc.equal(found["partition.topic"], topic)).to_pylist()) if found.num_rows else []

    def rows_of(self, topic: str) -> pa.dataset.Dataset:
        """Return a topic's rows, to be read with `lake_errors`."""
        return self.delta.to_pyarrow_dataset(file_pruning_predicate=[("topic", "=", topic)])

    def file_system(self) -> Any:
        """Return an Arrow file system with the table's folder as its root."""
        import pyarrow.fs as pa_fs
        from deltalake.fs import DeltaStorageHandler

        return pa_fs.PyFileSystem(DeltaStorageHandler(self._address, self._options))

    def compact(self, topic: str) -> int:
        """Compact days with many small files of a topic; return how many files went."""
        if self.name == "lineage":
            return 0
        places: dict[tuple[Any, Any], int] = {}
        for file in self.files(topic):
            if file["size_bytes"] < FILE_BYTES // 2:
                place = file["partition.day"], file["partition.partition"]
                places[place] = places.get(place, 0) + 1
        gone = 0
        for day in sorted({day for (day, _), count in places.items() if count >= SMALL_FILES}):
            filters = [("topic", "=", topic), ("day", "=", day.isoformat())]
            with lake_errors(self.location):
                done = self.delta.optimize.compact(partition_filters=filters, target_size=FILE_BYTES)
            gone += int(done["numFilesRemoved"])
            self.refresh()
        return gone

    def vacuum(self) -> int:
        """Delete files that no reader needs any more: replaced ones, and those of writers that were killed."""
        hours = int(KEPT.total_seconds() // 3600)
        with lake_errors(self.location):
            return len(self.delta.vacuum(retention_hours=hours, dry_run=False, full=True))


@contextmanager
def lake_errors(location: str) -> Iterator[None]:
    """Translate errors of the tables' library."""
    from deltalake.exceptions import CommitFailedError, DeltaError

    try:
        yield
    except CommitFailedError as error:
        raise TransactionConflict("delta", _plain(error)) from None
    except (DeltaError, OSError) as error:
        raise StoreUnavailable(location, _plain(error)) from None


def _plain(error: Exception) -> str:
    # The first line; later ones may be a reader's stack.
    lines = [_COLOUR.sub("", line).strip(" ↳") for line in redact(str(error)).splitlines()]
    return ": ".join([line for line in lines if line][:3])[:500] or type(error).__name__


def _watched(batches: Iterator[pa.RecordBatch], failed: list[BaseException]) -> Iterator[pa.RecordBatch]:
    try:
        yield from batches
    except Exception as error:
        # The library says it in words of its own.
        failed.append(error)
        raise
