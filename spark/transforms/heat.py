"""Load per LP, key and partition."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

HOTTEST: Final = 100


def lp_heat(records: DataFrame) -> DataFrame:
    """Return records and distinct keys per topic and LP."""
    found = records.groupBy("topic", "lp")
    return found.agg(F.count("*").alias("records"), F.count_distinct("key").alias("keys"))


def hottest_keys(records: DataFrame, count: int = HOTTEST) -> DataFrame:
    """Return topics' largest keys, their LP and share of all records."""
    per_key = records.groupBy("topic", "key", "lp").agg(F.count("*").alias("records"))
    share = F.col("records") / F.sum("records").over(Window.partitionBy("topic"))
    rank = F.row_number().over(Window.partitionBy("topic").orderBy(F.desc("records"), "key"))
    # Messages without a key count in the whole only.
    ranked = per_key.withColumn("share", share).filter(F.col("key").isNotNull()).withColumn("rank", rank)
    return ranked.filter(F.col("rank") <= count)


def partition_heat(heat: DataFrame, lineage: DataFrame) -> DataFrame:
    """Return per partition in force its LPs' records, wherever stored, and its hottest LP's."""
    ranges = lineage.filter(F.col("last_version").isNull()).select("topic", "partition", "lp_from", "lp_to").alias("r")
    inside = (F.col("r.topic") == F.col("h.topic")) & F.col("h.lp").between(F.col("r.lp_from"), F.col("r.lp_to") - 1)
    rows = ranges.join(heat.alias("h"), inside, "left")
    found = rows.groupBy("r.topic", "r.partition", "r.lp_from", "r.lp_to")
    return found.agg(
        F.coalesce(F.sum("h.records"), F.lit(0)).alias("records"),
        F.coalesce(F.max("h.records"), F.lit(0)).alias("hottest_lp_records"),
    )
