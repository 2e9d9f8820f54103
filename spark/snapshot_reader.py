"""Snapshots of the archive as DataFrames, by three ways with one schema.

- ``jdbc``: Spark's JDBC source; needs Postgres' driver on the class path
- ``python``: Arrow in Python workers; needs no jar
- an export in Parquet; needs no database

Passwords are in no plan.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from pyspark.sql import DataFrame, SparkSession

from mqlayer.archive.columns import ArchiveTable, check_table, chosen_columns
from mqlayer.archive.snapshots import SeqRange, find_snapshot, sample_width, snapshot_cut
from mqlayer.errors import InvalidInput
from mqlayer.postgres.arrow_reader import ReadAddress, read_address
from mqlayer.postgres.database import Database
from mqlayer.settings import Settings
from mqlayer.spark import jdbc
from mqlayer.spark.chain_check import COLUMNS, check_chain
from mqlayer.spark.data_source import APPLICATION, Exported, bound_source, parts_of
from mqlayer.spark.parquet_snapshot import ParquetSnapshot

if TYPE_CHECKING:
    from mqlayer.spark.lake_snapshot import LakeFrames

ReadMethod = Literal["jdbc", "python"]
METHODS: Final = ("jdbc", "python")
# A private name: `mqlayer` may be bound to another database.
BOUND: Final = "mqlayer_bound"

_registering = threading.Lock()


def read_snapshot(
    spark: SparkSession,
    name: str,
    *,
    table: ArchiveTable = "records",
    dsn: str | None = None,
    columns: Sequence[str] | None = None,
    method: ReadMethod | None = None,
    partitions: int | None = None,
    check: bool = False,
) -> DataFrame:
    """Return a snapshot's records, outcomes or lineage; every read gives the same rows.

    `dsn`: default MQLAYER_DSN. `columns`: only these, in this order. `method`: default JDBC if a driver and host allow
    it, else Python. `partitions`: most tasks. `check`: first prove by another read that each seq of the cut is there
    once.

    Raises ArchiveBroken (`check`), NotFound, InvalidInput for a wrong option.
    """
    selection = _Selection.of(table, columns, check=check)
    if partitions is not None and partitions < 1:
        raise InvalidInput(f"option partitions: {partitions} tasks can't read; say 1 or more")
    if method is not None and method not in METHODS:
        raise InvalidInput(f"option method: there is no {method!r}; choose one of {', '.join(METHODS)}")
    address = read_address(dsn or Settings().control_dsn())
    how = _method(spark, method, address)
    return selection.read(DatabaseSnapshot(spark, name, address, how, partitions or _parallelism(spark)), name)


def read_across(
    spark: SparkSession,
    name: str,
    export: str,
    *,
    table: ArchiveTable = "records",
    dsn: str | None = None,
    columns: Sequence[str] | None = None,
    method: ReadMethod | None = None,
    check: bool = False,
) -> DataFrame:
    """As `read_snapshot`, with the batches of an export to a lake (its location) from there."""
    from mqlayer.spark.lake_snapshot import LakeFrames

    selection = _Selection.of(table, columns, check=check)
    address = read_address(dsn or Settings().control_dsn())
    source = DatabaseSnapshot(spark, name, address, _method(spark, method, address), _parallelism(spark))
    return selection.read(LakeFrames(spark, source, name, export), name)


def read_export(
    spark: SparkSession,
    name: str,
    path: str,
    *,
    table: ArchiveTable = "records",
    columns: Sequence[str] | None = None,
    check: bool = False,
) -> DataFrame:
    """As `read_snapshot`, from a Parquet export, without the database.

    Raises ArchiveBroken (`check`), InvalidInput for a wrong option or another snapshot's export.
    """
    return _Selection.of(table, columns, check=check).read(ParquetSnapshot(spark, name, path), name)


class _Selection(NamedTuple):
    table: ArchiveTable
    columns: Mapping[str, str]
    check: bool

    @classmethod
    def of(cls, table: ArchiveTable, columns: Sequence[str] | None, *, check: bool) -> _Selection:
        known = check_table(table)
        return cls(known, chosen_columns(known, None if columns is None else list(columns)), check)

    def read(self, source: ParquetSnapshot | DatabaseSnapshot | LakeFrames, name: str) -> DataFrame:
        if self.check:
            check_chain(source.frame("records", chosen_columns("records", list(COLUMNS))), source.cut(), name=name)
        return source.frame(self.table, self.columns)


class DatabaseSnapshot:
    """A snapshot in Postgres."""

    def __init__(self, spark: SparkSession, name: str, address: ReadAddress, method: str, partitions: int) -> None:
        self._spark, self._name, self._address, self._method, self._partitions = (
            spark,
            name,
            address,
            method,
            partitions,
        )
        with self.database() as database:
            self._id = find_snapshot(database, name).snapshot_id

    def frame(self, table: ArchiveTable, columns: Mapping[str, str], exported: Exported | None = None) -> DataFrame:
        """Return a table's columns; `exported`: without what an export has."""
        if self._method == "jdbc":
            with self.database() as database:
                statement, conditions = parts_of(database, self._id, table, self._partitions, exported)
                width = sample_width(database, self._id)
            return jdbc.snapshot_frame(
                self._spark,
                self._address,
                self._id,
                statement=statement,
                columns=columns,
                conditions=conditions,
                width=width,
                exported=exported.upto if exported else {},
            )
        options = {"snapshot": self._name, "table": table, "columns": ",".join(columns)}
        if exported is not None:
            options["exported"] = exported.as_option()
        # Spark resolves the registered name only while it makes the frame.
        with _registering:
            _register(self._spark, self._address, BOUND)
            return self._spark.read.format(BOUND).options(**options, partitions=str(self._partitions)).load()

    def cut(self) -> list[SeqRange]:
        """Return the snapshot's seq ranges."""
        with self.database() as database:
            return snapshot_cut(database, self._id)

    def database(self) -> Database:
        """Return the database."""
        return Database(self._address.conninfo(application=APPLICATION))


def register(spark: SparkSession, *, dsn: str | None = None) -> None:
    """Let Spark read and stream this database's archive by format mqlayer; default MQLAYER_DSN."""
    _register(spark, read_address(dsn or Settings().control_dsn()), "mqlayer")


def _register(spark: SparkSession, address: ReadAddress, called: str) -> None:
    spark.dataSource.register(bound_source(address, called=called))


def _method(spark: SparkSession, method: str | None, address: ReadAddress) -> str:
    if method is None:
        reachable = not address.parameters["host"].startswith("/")
        return "jdbc" if reachable and jdbc.has_driver(spark) else "python"
    if method == "jdbc" and not jdbc.has_driver(spark):
        raise InvalidInput(
            "option method: Postgres' JDBC driver is not on Spark's class path; install it (Debian: "
            "libpostgresql-jdbc-java), name its jar in spark.jars, or say method='python'"
        )
    return method


def _parallelism(spark: SparkSession) -> int:
    try:
        return max(1, int(spark.sparkContext.defaultParallelism))
    except (AttributeError, NotImplementedError):
        # Spark Connect has no such value.
        return 4
