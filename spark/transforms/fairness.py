"""How a group's work spreads over members."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812


def by_member(outcomes: DataFrame) -> DataFrame:
    """Return per group and member: messages, share, busy seconds.

    Busy is from first delivery to settling, overlaps once; messages without delivery time add none.
    """
    handled = outcomes.filter(F.col("outcome") == "handled")
    who = ["topic", "group", "actor"]
    begun = Window.partitionBy(*who).orderBy("delivered_at", "settled_at")
    known = F.col("delivered_at").isNotNull()
    until = F.max(F.when(known, F.col("settled_at"))).over(begun.rowsBetween(Window.unboundedPreceding, -1))
    # Only time beyond all earlier deliveries is new.
    since = F.greatest(F.col("delivered_at"), F.coalesce(until, F.col("delivered_at")))
    fresh_us = F.greatest(F.unix_micros(F.col("settled_at")) - F.unix_micros(since), F.lit(0))
    fresh_us = F.when(known, fresh_us).otherwise(F.lit(0))
    rows = handled.select(*who, (F.col("last_offset") - F.col("first_offset") + 1).alias("n"), fresh_us.alias("us"))
    found = rows.groupBy(*who).agg(F.sum("n").alias("messages"), (F.sum("us") / 1_000_000).alias("busy_s"))
    share = F.col("messages") / F.sum("messages").over(Window.partitionBy("topic", "group"))
    return found.withColumn("share", share)


def by_group(members: DataFrame) -> DataFrame:
    """Return per group: members with messages, their messages, maximum to mean, Gini of messages and busy time.

    Gini 0: all equal; near 1: one does all.
    """
    group = ["topic", "group"]
    for name in ("messages", "busy_s"):
        rank = F.row_number().over(Window.partitionBy(*group).orderBy(name, "actor"))
        members = members.withColumn(f"rank_{name}", rank)
    n = F.count("*")
    return members.groupBy(*group).agg(
        n.alias("members"),
        F.sum("messages").alias("messages"),
        (F.max("messages") / F.avg("messages")).alias("max_to_mean"),
        _gini("messages").alias("gini_messages"),
        _gini("busy_s").alias("gini_busy"),
    )


def _gini(name: str) -> Column:
    n, total = F.count("*"), F.sum(name)
    weighted = F.sum(F.col(name) * F.col(f"rank_{name}"))
    return F.when(total > 0, 2 * weighted / (n * total) - (n + 1) / n).otherwise(F.lit(0.0))
