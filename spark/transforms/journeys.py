"""Messages' time per stage of their way through a group; docs/how-to/analyze.md explains the stages."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from mqlayer.spark.transforms.failures import DEAD
from mqlayer.spark.transforms.latency import QUANTILES, per_offset

STAGES: Final = ("stream", "failing", "attempts", "parking", "dead")
ENDED: Final = ("handled", "unmatched")
UNDELIVERED: Final = ("unmatched", "expired")
"""Read, but not handled."""
MESSAGE: Final = ("topic", "group", "partition", "offset")


def journeys(records: DataFrame, outcomes: DataFrame) -> DataFrame:
    """Return a row per settled message and group; stages not passed are null.

    `outbox_most_ms`: until delivered or archived.
    """
    # Offsets that a fallen-back node assigned twice are left out; lengths are at least 0, because clocks differ.
    events = per_offset(outcomes.select(
        "topic", "group", "partition", "first_offset", "last_offset", "outcome", "attempts", "delivered_at",
        "settled_at", "epoch", "position",
    ))  # fmt: skip
    once = records.groupBy("topic", "partition", "offset").agg(
        F.count("*").alias("records"),
        *(F.first(name).alias(name) for name in ("key", "source", "lp", "seq", "published_at", "archived_at")),
    )
    rows = events.join(once.filter(F.col("records") == 1).drop("records"), ["topic", "partition", "offset"])
    at = Window.partitionBy(*MESSAGE).orderBy("epoch", "position")
    earlier = at.rowsBetween(Window.unboundedPreceding, -1)
    rows = rows.withColumn("before", F.lag("outcome").over(at)).withColumn("since", F.lag("settled_at").over(at))
    rows = rows.withColumn("over", F.coalesce(F.max(F.col("outcome").isin(*ENDED)).over(earlier), F.lit(False)))
    rows = rows.filter(~F.col("over")).withColumn("since", F.coalesce("since", "published_at"))
    known = F.coalesce("delivered_at", "settled_at")
    waited, tried = _ms("since", known), _ms(known, "settled_at")
    rows = rows.select(
        *MESSAGE, "key", "source", "lp", "seq", "published_at", "attempts", "outcome", "epoch", "position",
        _ms("published_at", F.least("archived_at", known)).alias("outbox"),
        F.when(_waits_in() == "stream", waited).alias("stream"),
        F.when(_waits_in() == "failing", waited).alias("failing"),
        F.when(F.col("delivered_at").isNotNull(), tried).alias("attempts_ms"),
        F.when(_waits_in() == "parking", waited).alias("parking"),
        F.when(_waits_in() == "dead", waited).alias("dead"),
    )  # fmt: skip
    lengths = [F.sum("attempts_ms" if stage == "attempts" else stage).alias(f"{stage}_ms") for stage in STAGES]
    found = rows.groupBy(*MESSAGE, "key", "source", "lp", "seq", "published_at").agg(
        *lengths,
        F.min("outbox").alias("outbox_most_ms"),
        F.max("attempts").alias("attempts"),
        F.count(F.when(F.col("outcome") == "parked", 1)).alias("parkings"),
        F.max_by("outcome", F.struct("epoch", "position")).alias("outcome"),
    )
    total: Column = F.lit(0).cast("bigint")
    for stage in STAGES:
        total = total + F.coalesce(f"{stage}_ms", F.lit(0))
    return found.withColumn("total_ms", total)


def by_stage(found: DataFrame) -> DataFrame:
    """Return quantiles per group and stage, and its share of the group's time."""
    pairs = ", ".join(f"'{stage}', {stage}_ms" for stage in STAGES)
    rows = found.selectExpr("topic", "group", f"stack({len(STAGES)}, {pairs}) AS (stage, ms)").filter("ms IS NOT NULL")
    quantiles = F.percentile("ms", F.array(*map(F.lit, QUANTILES)))
    sums = rows.groupBy("topic", "group", "stage").agg(
        F.count("*").alias("messages"), quantiles.alias("q"), F.max("ms").alias("longest_ms"), F.sum("ms").alias("ms")
    )
    named = [F.col("q")[place].alias(f"p{quantile * 100:.0f}_ms") for place, quantile in enumerate(QUANTILES)]
    whole = F.sum("ms").over(Window.partitionBy("topic", "group"))
    share = F.when(whole > 0, F.col("ms") / whole).otherwise(F.lit(0.0))
    return sums.select(
        "topic", "group", "stage", "messages", *named, "longest_ms", (F.col("ms") / 1_000).alias("sum_s"),
        share.alias("share"),
    )  # fmt: skip


def by_key(found: DataFrame) -> DataFrame:
    """Return sums per group and key."""
    sums = [F.coalesce(F.sum(f"{stage}_ms"), F.lit(0)).alias(f"{stage}_ms") for stage in STAGES]
    return (
        found.filter(F.col("key").isNotNull())
        .groupBy("topic", "group", "key")
        .agg(
            F.count("*").alias("messages"),
            F.sum("total_ms").alias("total_ms"),
            F.max("total_ms").alias("longest_ms"),
            *sums,
            F.max("attempts").alias("most_attempts"),
            F.sum("parkings").alias("parkings"),
        )
    )


def _waits_in() -> Column:
    first = F.col("before").isNull()
    read = F.col("delivered_at").isNotNull() | F.col("outcome").isin(*UNDELIVERED)
    return (
        F.when(first & (F.col("outcome") == "replayed"), "")
        .when(first & read, "stream")
        .when(first, "failing")
        .when(F.col("before").isin(*DEAD), "dead")
        .otherwise("parking")
    )


def _ms(since: Column | str, until: Column | str) -> Column:
    to = F.col(until) if isinstance(until, str) else until
    length = F.unix_micros(to) - F.unix_micros(F.col(since) if isinstance(since, str) else since)
    return F.greatest(F.round(length / 1_000).cast("bigint"), F.lit(0))
