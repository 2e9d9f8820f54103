"""Retries, parking and dead letters, by error and actor."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from mqlayer.spark.transforms.latency import per_offset

DEAD: Final = ("exhausted", "rejected", "skipped", "discarded", "expired")
CASE: Final = ("topic", "group", "outcome", "reason", "actor", "attempts", "retries", "final")


def cases(outcomes: DataFrame) -> DataFrame:
    """Return the number of `messages` per CASE.

    `retries`: attempts beyond the message's earlier outcomes. `final`: its last outcome, by (epoch, position); times
    come from several clocks.
    """
    at = Window.partitionBy("topic", "group", "partition", "offset").orderBy("epoch", "position")
    before = F.lag(F.struct("outcome", "attempts")).over(at)
    # Parked messages keep their attempts, and discarding a dead one adds none. After other outcomes they restart.
    goes_on = (before["outcome"] == "parked") | ((F.col("outcome") == "discarded") & before["outcome"].isin(*DEAD))
    counted = F.when(goes_on, before["attempts"])
    retries = F.greatest(F.col("attempts") - F.greatest(F.coalesce(counted, F.lit(1)), F.lit(1)), F.lit(0))
    rows = per_offset(outcomes).withColumns({
        "retries": F.when(F.col("outcome") == "redriven", 0).otherwise(retries),
        "final": F.lead("outcome").over(at).isNull(),
        "reason": F.coalesce("reason", F.lit("")),
    })  # fmt: skip
    return rows.groupBy(*CASE).agg(F.count("*").alias("messages"))


def by_outcome(found: DataFrame) -> DataFrame:
    """Return messages per topic, group and outcome; one with several counts in each, but once as `final`."""
    return found.groupBy("topic", "group", "outcome").agg(
        F.sum("messages").alias("messages"), _sum(F.col("final"), F.col("messages")).alias("final")
    )


def by_error(found: DataFrame) -> DataFrame:
    """Return dead letters per outcome, error and actor; `final`: still dead."""
    dead = found.filter(F.col("outcome").isin(*DEAD))
    return dead.groupBy("topic", "group", "outcome", "reason", "actor").agg(
        F.sum("messages").alias("messages"),
        F.sum(F.col("messages") * F.col("attempts")).alias("attempts"),
        _sum(F.col("final"), F.col("messages")).alias("final"),
    )


def by_member(found: DataFrame) -> DataFrame:
    """Return what actors settled; attempts before parking count for the parking one."""
    messages = F.col("messages")
    return found.groupBy("topic", "group", "actor").agg(
        F.sum(messages).alias("messages"),
        _sum(F.col("attempts") > 1, messages).alias("retried"),
        F.sum(messages * F.col("retries")).alias("retries"),
        F.max("attempts").alias("most_attempts"),
        _sum(F.col("outcome") == "parked", messages).alias("parked"),
        _sum(F.col("outcome").isin(*DEAD), messages).alias("dead"),
    )


def by_attempts(found: DataFrame) -> DataFrame:
    """Return handled messages per number of attempts."""
    handled = found.filter(F.col("outcome") == "handled")
    return handled.groupBy("topic", "group", "attempts").agg(F.sum("messages").alias("messages"))


def _sum(which: Column, what: Column) -> Column:
    return F.coalesce(F.sum(F.when(which, what)), F.lit(0))
