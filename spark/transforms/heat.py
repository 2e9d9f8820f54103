"""Where the load is: per LP, per key, per partition."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

HOTTEST: Final = 100
"""Keys that are listed of a topic."""


def lp_heat(records: DataFrame) -> DataFrame:
    """Return per topic and LP that has any: records, and how many different keys they have."""
    found = records.groupBy("topic", "lp")
    return found.agg(F.count("*").alias("records"), F.count_distinct("key").alias("keys"))


def hottest_keys(records: DataFrame, count: int = HOTTEST) -> DataFrame:
    """Return per topic the keys with the most records, their LP, and their share of all of the topic's records."""
    per_key = records.groupBy("topic", "key", "lp").agg(F.count("*").alias("records"))
    share = F.col("records") / F.sum("records").over(Window.partitionBy("topic"))
    rank = F.row_number().over(Window.partitionBy("topic").orderBy(F.desc("records"), "key"))
    # Messages without a key are nobody's in particular, but part of the whole.
    ranked = per_key.withColumn("share", share).filter(F.col("key").isNotNull()).withColumn("rank", rank)
    return ranked.filter(F.col("rank") <= count)


def partition_heat(heat: DataFrame, lineage: DataFrame) -> DataFrame:
    """Return per partition in force what its LPs took in, wherever that was stored, and the hottest LP's part of it."""
    ranges = lineage.filter(F.col("last_version").isNull()).select("topic", "partition", "lp_from", "lp_to").alias("r")
    inside = (F.col("r.topic") == F.col("h.topic")) & F.col("h.lp").between(F.col("r.lp_from"), F.col("r.lp_to") - 1)
    rows = ranges.join(heat.alias("h"), inside, "left")
    found = rows.groupBy("r.topic", "r.partition", "r.lp_from", "r.lp_to")
    return found.agg(
        F.coalesce(F.sum("h.records"), F.lit(0)).alias("records"),
        F.coalesce(F.max("h.records"), F.lit(0)).alias("hottest_lp_records"),
    )
