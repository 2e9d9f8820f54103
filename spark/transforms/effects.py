"""Effects beside outcomes: what fence and inbox rows prove, contradict or leave open.

docs/how-to/analyze.md explains the words. The fence has one row per key, with the last applied seq, so of a key's
messages only the last one is decided; rows expire, and messages without a row may be older than that.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from mqlayer.spark.transforms.latency import per_offset

EFFECTS: Final = (
    "topic string, group string, kind string, source bigint, lp int, key string, seq bigint, seek int, "
    "read_at timestamp"
)
"""`kind`: key (fence, the last seq of a key), message (fence of one message), inbox, name (inbox), replay."""

ENDED: Final = ("unmatched", "exhausted", "rejected", "skipped", "discarded", "dropped", "expired")
"""Outcomes that say: not handled."""
FAULTS: Final = ("without effect", "without handling")
MARGIN: Final = "1 hour"
IDENTITY: Final = ("topic", "source", "lp", "seq")
GROUP: Final = ("topic", "group")


def ended(records: DataFrame, outcomes: DataFrame) -> DataFrame:
    """Return messages of groups with `state` (handled, open, or an outcome of ENDED) and time of handling.

    Offsets that a fallen-back node assigned twice are left out, and results of replays.
    """
    rows = per_offset(outcomes.filter(F.col("outcome") != "replayed"))
    handled = F.col("outcome") == "handled"
    found = rows.groupBy(*GROUP, "partition", "offset").agg(
        F.max(handled).alias("handled"),
        F.max_by("outcome", F.struct("epoch", "position")).alias("last"),
        F.max(F.when(handled, F.col("settled_at"))).alias("settled_at"),
    )
    once = records.groupBy("topic", "partition", "offset").agg(
        F.count("*").alias("times"), F.first(F.struct("source", "lp", "seq", "key")).alias("message")
    )
    state = F.when(F.col("handled"), "handled").when(F.col("last").isin(*ENDED), F.col("last")).otherwise("open")
    joined = found.join(once.filter(F.col("times") == 1), ["topic", "partition", "offset"])
    return joined.select(*GROUP, "message.*", state.alias("state"), "settled_at")


def judged_messages(messages: DataFrame, effects: DataFrame, *, horizon: str) -> DataFrame:
    """Return handled messages with `verdict`; `horizon`: how long rows are kept."""
    handled = messages.filter(F.col("state") == "handled").drop("state")
    of_key = effects.filter(F.col("kind") == "key").select(
        *GROUP, "source", "lp", "key", F.col("seq").alias("applied"), "seek"
    )
    alone = effects.filter(F.col("kind").isin("message", "inbox", "name")).select(*GROUP, "source", "lp", "seq")
    groups = effects.groupBy(*GROUP).agg(
        F.max("read_at").alias("read_at"), F.max(F.col("kind") == "name").alias("named")
    )
    rows = handled.join(of_key, [*GROUP, "source", "lp", "key"], "left")
    rows = rows.join(alone.distinct().withColumn("alone", F.lit(True)), [*GROUP, "source", "lp", "seq"], "left")
    rows = rows.join(F.broadcast(groups), [*GROUP], "left")
    kept_from = F.col("read_at") - F.expr(f"INTERVAL {horizon}") + F.expr(f"INTERVAL {MARGIN}")
    verdict = (
        F.when(F.col("alone") | (F.col("applied") == F.col("seq")), "proved")
        .when(F.col("applied") > F.col("seq"), "covered")
        .when(F.col("read_at").isNull(), "no rows")
        .when(F.col("seek") > 0, "sought")
        .when(F.col("settled_at") < kept_from, "expired")
        .when(F.col("named"), "named")
        .otherwise("without effect")
    )
    return rows.select(*GROUP, "source", "lp", "seq", "key", verdict.alias("verdict"))


def judged_effects(effects: DataFrame, records: DataFrame, messages: DataFrame, cut: DataFrame) -> DataFrame:
    """Return effect rows with `verdict` and `reason`."""
    there = records.groupBy(*IDENTITY).agg(F.count("*").alias("times"), F.first("key").alias("record_key"))
    states = messages.groupBy(*GROUP, "source", "lp", "seq").agg(F.max_by("state", _rank()).alias("state"))
    ends = cut.select("topic", "source", "lp", "first_seq", "last_seq")
    rows = effects.join(F.broadcast(ends), ["topic", "source", "lp"], "left")
    rows = rows.join(there, list(IDENTITY), "left").join(states, [*GROUP, "source", "lp", "seq"], "left")
    other_key = (F.col("kind") == "key") & ~F.col("record_key").eqNullSafe(F.col("key"))
    reason = (
        F.when(F.col("times").isNull(), "no such message")
        .when(other_key, "the message has another key")
        .when(F.col("state").isin(*ENDED), F.concat(F.lit("the message is "), F.col("state")))
    )
    verdict = (
        F.when(F.col("kind") == "replay", "of a replay")
        .when(F.col("first_seq").isNull(), "unknown source")
        .when(F.col("seq") > F.col("last_seq"), "later")
        .when(F.col("seq") < F.col("first_seq"), "earlier")
        .when(reason.isNotNull(), "without handling")
        .when(F.col("state") == "handled", "proved")
        .otherwise("waiting")
    )
    told = F.when(verdict == "without handling", reason)
    return rows.select(*GROUP, "kind", "source", "lp", "seq", "key", verdict.alias("verdict"), told.alias("reason"))


def counts(judged: DataFrame) -> DataFrame:
    """Return rows per topic, group and verdict."""
    return judged.groupBy(*GROUP, "verdict").agg(F.count("*").alias("count"))


def findings(messages: DataFrame, effects: DataFrame) -> DataFrame:
    """Return a row per fault, of judged messages and effects."""
    columns = (*GROUP, "verdict", "source", "lp", "seq", "key")
    missing = messages.filter(F.col("verdict") == FAULTS[0]).select(
        *columns, F.lit(None).cast("string").alias("reason")
    )
    return missing.unionByName(effects.filter(F.col("verdict") == FAULTS[1]).select(*columns, "reason"))


def _rank() -> Column:
    return F.when(F.col("state") == "handled", 2).when(F.col("state") == "open", 1).otherwise(0)
