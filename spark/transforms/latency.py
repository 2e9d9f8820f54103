"""Throughput, and latency from publishing to first handling."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

OFFSETS_AT_ONCE: Final = 1_024
QUANTILES: Final = (0.5, 0.95, 0.99)


def per_offset(outcomes: DataFrame) -> DataFrame:
    """Return a row per offset of outcomes; rows hold at most 1,024 meanwhile."""
    last = F.least(F.col("begin") + (OFFSETS_AT_ONCE - 1), F.col("last_offset"))
    begins = F.sequence("first_offset", "last_offset", F.lit(OFFSETS_AT_ONCE).cast("bigint"))
    return (
        outcomes.withColumn("begin", F.explode(begins))
        .withColumn("offset", F.explode(F.sequence("begin", last)))
        .drop("begin", "first_offset", "last_offset")
    )


def settled(records: DataFrame, outcomes: DataFrame) -> DataFrame:
    """Return handled records per group: time published, time first handled, milliseconds between.

    At least 0, because clocks differ. Offsets that a fallen-back node assigned twice are left out: which record was
    handled is unknown.
    """
    handled = per_offset(outcomes.filter(F.col("outcome") == "handled").select(
        "topic", "group", "partition", "first_offset", "last_offset", "settled_at"
    ))  # fmt: skip
    first = handled.groupBy("topic", "group", "partition", "offset").agg(F.min("settled_at").alias("settled_at"))
    once = records.groupBy("topic", "partition", "offset").agg(
        F.count("*").alias("records"), F.first("published_at").alias("published_at")
    )
    published = once.filter(F.col("records") == 1).drop("records")
    ms = F.round((_micros("settled_at") - _micros("published_at")) / 1_000).cast("bigint")
    return first.join(published, ["topic", "partition", "offset"]).withColumn("ms", F.greatest(ms, F.lit(0)))


def latency(rows: DataFrame, *by: str) -> DataFrame:
    """Return per topic, group and `by`: messages, exact p50, p95, p99, longest (ms)."""
    quantiles = F.percentile("ms", F.array(*map(F.lit, QUANTILES)))
    found = rows.groupBy("topic", "group", *by).agg(
        F.count("*").alias("messages"), quantiles.alias("q"), F.max("ms").alias("longest_ms")
    )
    named = [F.col("q")[place].alias(f"p{quantile * 100:.0f}_ms") for place, quantile in enumerate(QUANTILES)]
    return found.select("topic", "group", *by, "messages", *named, "longest_ms")


def by_minute(rows: DataFrame) -> DataFrame:
    """Return `latency` and messages per second, by minute of handling."""
    found = latency(rows.withColumn("minute", F.date_trunc("minute", "settled_at")), "minute")
    return found.withColumn("per_s", F.col("messages") / 60)


def published_by_minute(records: DataFrame) -> DataFrame:
    """Return messages published per topic and minute (publishers' clocks)."""
    found = records.groupBy("topic", F.date_trunc("minute", "published_at").alias("minute"))
    return found.agg(F.count("*").alias("messages")).withColumn("per_s", F.col("messages") / 60)


def _micros(name: str) -> Column:
    return F.unix_micros(F.col(name))
