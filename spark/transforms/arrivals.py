"""Arrivals per slot and LP; members' rates."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from mqlayer.spark.transforms.latency import per_offset

HOT_SHARE: Final = 0.01
"""So 100 keys at most."""
RATE_S: Final = 10
"""Seconds that rates are taken over."""


def span(records: DataFrame) -> DataFrame:
    """Return per topic: records, first and last time of publishing."""
    at = F.unix_micros("published_at")
    return records.groupBy("topic").agg(
        F.count("*").alias("records"), F.min(at).alias("first_us"), F.max(at).alias("last_us")
    )


def hot_keys(records: DataFrame, share: float = HOT_SHARE) -> DataFrame:
    """Return the keys with this share of a topic or more."""
    whole = records.groupBy("topic").agg(F.count("*").alias("all"))
    per_key = records.filter(F.col("key").isNotNull()).groupBy("topic", "key").agg(F.count("*").alias("records"))
    found = per_key.join(F.broadcast(whole), "topic").withColumn("share", F.col("records") / F.col("all"))
    return found.filter(F.col("share") >= share).select("topic", "key", "records", "share")


def arrivals(records: DataFrame, hot: DataFrame, began_us: int, slot_us: int) -> DataFrame:
    """Return messages per topic, slot, LP and hot key; null: other keys."""
    named = F.broadcast(hot.select("topic", "key", F.col("key").alias("hot_key")))
    slot = _slot("published_at", began_us, slot_us)
    rows = records.join(named, ["topic", "key"], "left").withColumn("slot", slot)
    return rows.groupBy("topic", "slot", "lp", "hot_key").agg(F.count("*").alias("messages"))


def settled_by_slot(outcomes: DataFrame, began_us: int, slot_us: int) -> DataFrame:
    """Return per topic, group and slot: messages settled for the first time."""
    first = per_offset(outcomes.select("topic", "group", "partition", "first_offset", "last_offset", "settled_at"))
    first = first.groupBy("topic", "group", "partition", "offset").agg(F.min("settled_at").alias("settled_at"))
    rows = first.withColumn("slot", F.greatest(_slot("settled_at", began_us, slot_us), F.lit(0)))
    return rows.groupBy("topic", "group", "slot").agg(F.count("*").alias("messages"))


def member_rates(outcomes: DataFrame, window_s: int = RATE_S) -> DataFrame:
    """Return per topic, group and member: messages, most per second in a window."""
    window = F.floor(F.unix_micros("settled_at") / F.lit(window_s * 1_000_000))
    handled = outcomes.filter(F.col("outcome") == "handled").withColumn("window", window)
    messages = F.sum(F.col("last_offset") - F.col("first_offset") + 1)
    per_window = handled.groupBy("topic", "group", "actor", "window").agg(messages.alias("messages"))
    return per_window.groupBy("topic", "group", "actor").agg(
        F.sum("messages").alias("messages"), (F.max("messages") / window_s).alias("most_per_s")
    )


def _slot(time: str, began_us: int, slot_us: int) -> Column:
    return F.floor((F.unix_micros(time) - F.lit(began_us)) / F.lit(slot_us)).cast("int")
