"""What did not go well: retries, parking and dead letters, by error and by who settled them."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from mqlayer.spark.transforms.latency import per_offset

DEAD: Final = ("exhausted", "rejected", "skipped", "discarded")
CASE: Final = ("topic", "group", "outcome", "reason", "actor", "attempts", "retries", "final")


def cases(outcomes: DataFrame) -> DataFrame:
    """Return what became of messages, with the number of `messages` that have all in common: word, reason, actor,
    attempts, how many of these were `retries` that no earlier outcome of the message has, and whether it is the
    `final` one: what became of the message in the end.

    Outcomes of one message are in the order of (epoch, place), never of times, which come from several clocks.
    """
    at = Window.partitionBy("topic", "group", "partition", "offset").orderBy("epoch", "position")
    before = F.lag(F.struct("outcome", "attempts")).over(at)
    # Attempts of what was parked go on where they were, and an operator's word on what is dead makes none. After
    # anything else they begin anew.
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
    """Return per topic, group and word how many messages came to it, and for how many it is `final`. One that came to
    two, such as parked and then handled, counts in both."""
    return found.groupBy("topic", "group", "outcome").agg(
        F.sum("messages").alias("messages"), _sum(F.col("final"), F.col("messages")).alias("final")
    )


def by_error(found: DataFrame) -> DataFrame:
    """Return the dead letters per topic, group, word, error and actor, with their attempts; `final` are those that are
    still dead."""
    dead = found.filter(F.col("outcome").isin(*DEAD))
    return dead.groupBy("topic", "group", "outcome", "reason", "actor").agg(
        F.sum("messages").alias("messages"),
        F.sum(F.col("messages") * F.col("attempts")).alias("attempts"),
        _sum(F.col("final"), F.col("messages")).alias("final"),
    )


def by_member(found: DataFrame) -> DataFrame:
    """Return per topic, group and actor what it settled: messages, those of several attempts, retries, the most
    attempts of one, and how many were parked or died. Attempts before a message was parked count for who parked it."""
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
    """Return per topic, group and number of attempts how many messages needed so many until they were handled."""
    handled = found.filter(F.col("outcome") == "handled")
    return handled.groupBy("topic", "group", "attempts").agg(F.sum("messages").alias("messages"))


def _sum(which: Column, what: Column) -> Column:
    return F.coalesce(F.sum(F.when(which, what)), F.lit(0))
