"""Snapshots exported as Parquet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from mqlayer.archive.columns import ArchiveTable
from mqlayer.archive.parquet_export import FORMAT, MANIFEST
from mqlayer.archive.snapshots import SeqRange
from mqlayer.domain.body_schemas import JsonSchema
from mqlayer.errors import InvalidInput
from mqlayer.spark.schemas import declared


class ParquetSnapshot:
    """An export, in any file system of Spark. Raises InvalidInput for another snapshot's."""

    def __init__(self, spark: SparkSession, name: str, path: str) -> None:
        self._spark, self._path = spark, path.rstrip("/")
        self.manifest = self._load()
        if self.manifest["snapshot"] != name:
            raise InvalidInput(f"option path: {path} holds snapshot {self.manifest['snapshot']!r}, not {name!r}")

    def frame(self, table: ArchiveTable, columns: Mapping[str, str]) -> DataFrame:
        """Return columns of the manifest's files."""
        facts = self.manifest["tables"][table]
        files = [f"{self._path}/{file['path']}" for file in facts["files"]]
        return self._spark.read.schema(declared(facts["columns"])).parquet(*files).select(*map(_quoted, columns))

    def cut(self) -> list[SeqRange]:
        """Return the snapshot's seq ranges."""
        return [SeqRange(*one) for one in self.manifest["cut"]]

    def topics(self) -> list[str]:
        """Return the snapshot's topics."""
        return [str(one["topic"]) for one in self.manifest["topics"]]

    def schemas(self, topic: str) -> list[JsonSchema]:
        """Return a topic's schemas of its time."""
        found: list[JsonSchema] = self.manifest.get("schemas", {}).get(topic, [])
        return found

    def _load(self) -> dict[str, Any]:
        try:
            rows = self._spark.read.text(f"{self._path}/{MANIFEST}", wholetext=True).collect()
        except PySparkException as error:
            raise InvalidInput(f"option path: no export is at {self._path} ({error.getCondition()})") from None
        manifest: dict[str, Any] = json.loads(rows[0].value)
        if manifest.get("format") != FORMAT:
            raise InvalidInput(
                f"option path: {self._path} was exported in another format: upgrade mqlayer, or export anew"
            )
        return manifest


def _quoted(name: str) -> str:
    return f"`{name}`"
