"""Snapshots of the archive as DataFrames, by three ways with one schema.

- ``jdbc``: Spark's JDBC source; needs Postgres' driver on the class path
- ``python``: Arrow in Python workers; needs no jar
- an export in Parquet; needs no database

Passwords are in no plan.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypedDict, Unpack

from pyspark.sql import DataFrame, SparkSession

from mqlayer.archive.columns import ArchiveTable, check_table, chosen_columns
from mqlayer.archive.lake.state import lake_location
from mqlayer.archive.snapshots import SeqRange, find_snapshot, sample_width, snapshot_cut, snapshot_schemas
from mqlayer.errors import InvalidInput
from mqlayer.postgres.arrow_reader import ReadAddress, read_address
from mqlayer.postgres.database import Database
from mqlayer.settings import Settings
from mqlayer.spark import jdbc
from mqlayer.spark.body_decoding import (
    DECODED,
    ERROR,
    NEEDED,
    BodyDecoding,
    decoded_frame,
    typed_decoding,
)
from mqlayer.spark.body_types import body_shape
from mqlayer.spark.chain_check import COLUMNS, check_chain
from mqlayer.spark.data_source import APPLICATION, bound_source, parts_of
from mqlayer.spark.package_path import share_package
from mqlayer.spark.parquet_snapshot import ParquetSnapshot
from mqlayer.spark.session import parallelism

if TYPE_CHECKING:
    from mqlayer.domain.body_schemas import JsonSchema
    from mqlayer.typed_topic import Topic

ReadMethod = Literal["jdbc", "python"]
METHODS: Final = ("jdbc", "python")
# A private name: `mqlayer` may be bound to another database.
BOUND: Final = "mqlayer_bound"
TASK_RECORDS: Final = 1_000_000
"""At most about so many per task by default: its transaction, which holds back vacuum, lasts for seconds."""

_registering = threading.Lock()


class ReadOptions(TypedDict, total=False):
    """Options of both readers.

    `columns`: only these, in this order. `check`: first prove by another read that each seq of the cut is there once.
    `decode`: True, a topic's name or a `mqlayer.Topic`; `strict`: as `decode_bodies`.
    """

    table: ArchiveTable
    columns: Sequence[str] | None
    check: bool
    decode: bool | str | Topic[Any]
    strict: bool


def read_snapshot(
    spark: SparkSession,
    name: str,
    *,
    dsn: str | None = None,
    method: ReadMethod | None = None,
    partitions: int | None = None,
    export: str | None = None,
    **options: Unpack[ReadOptions],
) -> DataFrame:
    """Return a snapshot's records, outcomes or lineage; every read gives the same rows.

    `dsn`: default MQLAYER_DSN. `method`: default JDBC if a driver and host allow it, else Python. `partitions`: most
    tasks, by default one per core, or per million records. `export`: a lake's location, read by Python.

    Raises ArchiveBroken, NotFound, InvalidInput for a wrong option.
    """
    selection = _Selection.of(**options)
    if partitions is not None and partitions < 1:
        raise InvalidInput(f"option partitions: {partitions} tasks can't read; say 1 or more")
    if method is not None and method not in METHODS:
        raise InvalidInput(f"option method: there is no {method!r}; choose one of {', '.join(METHODS)}")
    address = read_address(dsn or Settings().control_dsn())
    how = _method(spark, method, address) if export is None else _method_of_export(method)
    lake = None if export is None else lake_location(export)
    return selection.read(_DatabaseSnapshot(spark, name, address, how, partitions, lake), name)


def read_export(spark: SparkSession, name: str, path: str, **options: Unpack[ReadOptions]) -> DataFrame:
    """As `read_snapshot`, from a Parquet export, without the database.

    Raises ArchiveBroken (`check`), InvalidInput for a wrong option or another snapshot's export.
    """
    return _Selection.of(**options).read(ParquetSnapshot(spark, name, path), name)


class _Selection(NamedTuple):
    table: ArchiveTable
    columns: Mapping[str, str]
    check: bool
    decode: bool | str | Topic[Any]
    strict: bool

    @classmethod
    def of(
        cls,
        *,
        table: ArchiveTable = "records",
        columns: Sequence[str] | None = None,
        check: bool = False,
        decode: bool | str | Topic[Any] = False,
        strict: bool = False,
    ) -> _Selection:
        known = check_table(table)
        if decode and known != "records":
            raise InvalidInput(f"option decode: {known} have no bodies; leave it out, or read the records")
        if strict and not decode:
            raise InvalidInput("option strict goes with decode: say which topic's bodies to decode")
        return cls(known, chosen_columns(known, None if columns is None else list(columns)), check, decode, strict)

    def read(self, source: ParquetSnapshot | _DatabaseSnapshot, name: str) -> DataFrame:
        if self.check:
            check_chain(source.frame("records", chosen_columns("records", list(COLUMNS))), source.cut(), name=name)
        if not self.decode:
            return source.frame(self.table, self.columns)
        decoding = self._decoding(source, name)
        needed = [*self.columns, *(column for column in (*NEEDED, "partition", "offset") if column not in self.columns)]
        found = decoded_frame(source.frame("records", chosen_columns("records", needed)), decoding)
        return found.select(*self.columns, DECODED, *(() if self.strict else (ERROR,)))

    def _decoding(self, source: ParquetSnapshot | _DatabaseSnapshot, name: str) -> BodyDecoding:
        topics = source.topics()
        named = self.decode.name if hasattr(self.decode, "name") else self.decode
        if isinstance(named, str) and named not in topics:
            raise InvalidInput(f"option decode: snapshot {name!r} has no topic {named!r}; it has {', '.join(topics)}")
        if not isinstance(self.decode, bool | str):
            return typed_decoding(self.decode, strict=self.strict)
        if isinstance(self.decode, bool) and len(topics) != 1:
            raise InvalidInput(f"option decode: snapshot {name!r} has topics {', '.join(topics)}; name one of them")
        topic = self.decode if isinstance(self.decode, str) else topics[0]
        return BodyDecoding(topic, body_shape(topic, source.schemas(topic)), strict=self.strict)


class _DatabaseSnapshot:
    def __init__(
        self,
        spark: SparkSession,
        name: str,
        address: ReadAddress,
        method: str,
        partitions: int | None,
        export: str | None,
    ) -> None:
        self._spark, self._name, self._address, self._method, self._export = spark, name, address, method, export
        with self._database() as database:
            found = find_snapshot(database, name)
        self._id, self._topics = found.snapshot_id, [topic.topic for topic in found.topics]
        self._partitions = partitions or max(parallelism(spark), -(-found.records // TASK_RECORDS))

    def frame(self, table: ArchiveTable, columns: Mapping[str, str]) -> DataFrame:
        if self._method == "jdbc":
            with self._database() as database:
                statement, conditions = parts_of(database, self._id, table, self._partitions)
                width = sample_width(database, self._id)
            return jdbc.snapshot_frame(
                self._spark,
                self._address,
                self._id,
                statement=statement,
                columns=columns,
                conditions=conditions,
                width=width,
            )
        options = {"snapshot": self._name, "table": table, "columns": ",".join(columns)}
        if self._export is not None:
            options["export"] = self._export
        # Spark resolves the registered name only while it makes the frame.
        with _registering:
            _register(self._spark, self._address, BOUND)
            return self._spark.read.format(BOUND).options(**options, partitions=str(self._partitions)).load()

    def cut(self) -> list[SeqRange]:
        with self._database() as database:
            return snapshot_cut(database, self._id)

    def topics(self) -> list[str]:
        return self._topics

    def schemas(self, topic: str) -> list[JsonSchema]:
        with self._database() as database:
            return snapshot_schemas(database, self._id).get(topic, [])

    def _database(self) -> Database:
        return Database(self._address.conninfo(application=APPLICATION))


def register(spark: SparkSession, *, dsn: str | None = None) -> None:
    """Let Spark read and stream this database's archive by format mqlayer; default MQLAYER_DSN."""
    _register(spark, read_address(dsn or Settings().control_dsn()), "mqlayer")


def _register(spark: SparkSession, address: ReadAddress, called: str) -> None:
    share_package(spark)
    spark.dataSource.register(bound_source(address, called=called))


def _method_of_export(method: str | None) -> str:
    if method == "jdbc":
        raise InvalidInput("option method: jdbc reads no export to a lake; leave it out, or say python")
    return "python"


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
