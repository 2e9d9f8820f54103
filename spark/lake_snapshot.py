"""Snapshots across an export to a lake and Postgres. Executors read the lake's files as Parquet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from mqlayer.archive.columns import ArchiveTable
from mqlayer.archive.lake.reading import LakeSnapshot, lake_snapshot
from mqlayer.archive.lake.tables import lake_columns, lake_errors
from mqlayer.archive.snapshots import SeqRange, snapshot_ranges
from mqlayer.spark.data_source import Exported
from mqlayer.spark.schemas import declared

if TYPE_CHECKING:
    from mqlayer.domain.body_schemas import JsonSchema
    from mqlayer.spark.snapshot_reader import DatabaseSnapshot


class LakeFrames:
    """A snapshot: batches that the export has from there, the others from Postgres. Raises as `lake_snapshot`."""

    def __init__(self, spark: SparkSession, database: DatabaseSnapshot, name: str, location: str) -> None:
        self._spark, self._rest, self._name, self._location = spark, database, name, location

    def cut(self) -> list[SeqRange]:
        """Return the snapshot's seq ranges."""
        return self._rest.cut()

    def topics(self) -> list[str]:
        """Return the topics' names."""
        return self._rest.topics()

    def schemas(self, topic: str) -> list[JsonSchema]:
        """Return a topic's schemas that hold, the oldest first."""
        return self._rest.schemas(topic)

    def frame(self, table: ArchiveTable, columns: Mapping[str, str]) -> DataFrame:
        """Return a table's columns."""
        if table == "lineage":
            # Postgres keeps the lineage of all that was ever archived.
            return self._rest.frame(table, columns)
        with self._rest.database() as database:
            divided = lake_snapshot(database, self._name, self._location, table)
            ranges = snapshot_ranges(database, divided.snapshot.snapshot_id) if table == "records" else []
        rest = self._rest.frame(table, columns, Exported(divided.exported, divided.rest))
        files = self._files(divided)
        if not files:
            return rest
        return self._lake(divided, files, ranges).select([f"`{name}`" for name in columns]).union(rest)

    def _files(self, divided: LakeSnapshot) -> list[str]:
        topics = sorted({part.topic for part in divided.parts if part.upto >= part.first})
        if not topics:
            return []
        with lake_errors(self._location):
            return list(divided.table.delta.file_uris(file_pruning_predicate=[("topic", "in", topics)]))

    def _lake(self, divided: LakeSnapshot, files: list[str], ranges: list[tuple[int, int, int, int, int]]) -> DataFrame:
        table = divided.table.name
        known = {name: word for name, word in lake_columns(table).items() if word != "date"}
        base = f"{divided.table.location}/{table}"
        rows = self._spark.read.schema(declared(known)).option("basePath", base).parquet(*files)
        bounds = [(part.topic_id, part.first, part.upto) for part in divided.parts]
        limits = self._spark.createDataFrame(bounds, "topic_id int, first_batch bigint, last_batch bigint")
        kept = rows.join(F.broadcast(limits), "topic_id").where("batch BETWEEN first_batch AND last_batch")
        if table == "records":
            cut = self._spark.createDataFrame(
                ranges, "topic_id int, source bigint, lp int, first_seq bigint, last_seq bigint"
            )
            kept = kept.join(F.broadcast(cut), ["topic_id", "source", "lp"]).where("seq BETWEEN first_seq AND last_seq")
        return kept
