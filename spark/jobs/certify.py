"""Contents of order certificates, by Spark. The driver holds a row per chain, and a hash per block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from mqlayer.archive import find_snapshot
from mqlayer.archive.certificates import AuditCounts, Block, Certificate, ChainKey, Contents, Seam, chains_of
from mqlayer.archive.certify import ends_of, export_facts, snapshot_facts
from mqlayer.archive.snapshots import snapshot_cut
from mqlayer.postgres.database import Database
from mqlayer.spark.jobs.job import rows_of
from mqlayer.spark.parquet_snapshot import ParquetSnapshot
from mqlayer.spark.snapshot_reader import read_export, read_snapshot
from mqlayer.spark.transforms import certificate as transforms
from mqlayer.spark.transforms import order

CUT: Final = "topic string, source bigint, lp int, first_seq bigint, last_seq bigint"
ENDS: Final = "topic string, source bigint, lp int, end bigint"


def snapshot_contents(
    spark: SparkSession,
    name: str,
    *,
    dsn: str,
    block_records: int,
    continues: Certificate | None = None,
    export: str | None = None,
) -> tuple[dict[str, Any], Contents]:
    """Compute a snapshot's facts and contents. Raises NotFound."""
    with Database(dsn) as database:
        found = find_snapshot(database, name)
        cut = spark.createDataFrame(snapshot_cut(database, found.snapshot_id), CUT)
    records = read_snapshot(spark, name, dsn=dsn, export=export)
    lineage = read_snapshot(spark, name, dsn=dsn, table="lineage", export=export).cache()
    ends = ends_of(continues)
    return snapshot_facts(found), contents_of(records, lineage, cut, block_records=block_records, last_seqs=ends)


def export_contents(
    spark: SparkSession, name: str, path: str, *, block_records: int, continues: Certificate | None = None
) -> tuple[dict[str, Any], Contents]:
    """As `snapshot_contents`, of a Parquet export. Raises InvalidInput."""
    export = ParquetSnapshot(spark, name, path)
    cut = spark.createDataFrame(export.cut(), CUT)
    records, lineage = read_export(spark, name, path), read_export(spark, name, path, table="lineage")
    ends = ends_of(continues)
    return export_facts(export.manifest), contents_of(
        records, lineage, cut, block_records=block_records, last_seqs=ends
    )


def contents_of(
    records: DataFrame,
    lineage: DataFrame,
    cut: DataFrame,
    *,
    block_records: int,
    last_seqs: Mapping[ChainKey, int],
) -> Contents:
    """Return the contents; bodies are read once."""
    # Not in memory: Java's heap has to hold the blocks that are made.
    rows = transforms.hashed(records).persist(StorageLevel.DISK_ONLY)
    try:
        found = rows_of(order.totals(order.chains(order.audited(rows, lineage, cut))), "topic")
        counts = {name: sum(topic[name] for topic in found) for name in ("inversions", "gaps", "duplicates")}
        audit = AuditCounts(**counts, misplaced=sum(topic["misplaced"] for topic in found))
        ends = [(*key, last) for key, last in last_seqs.items()]
        known = rows.sparkSession.createDataFrame(ends, ENDS) if ends else None
        blocks, seams = [], []
        for row in transforms.blocks(rows, block_records, known).toLocalIterator():
            key = ChainKey(row.topic, row.source, row.lp)
            blocks.append((key, row.records, Block(row.first_seq, row.last_seq, row.hash)))
            if row.seam is not None:
                seams.append(Seam(*key, row.first_seq, row.seam))
    finally:
        rows.unpersist()
    return Contents(chains_of(blocks), audit, sorted(seams))
