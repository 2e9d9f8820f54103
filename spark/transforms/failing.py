"""What did not go well: retries, parking and dead letters, by error and by who settled them."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

DEAD: Final = ("exhausted", "rejected", "skipped", "discarded")


def by_word(outcomes: DataFrame) -> DataFrame:
    """Return per topic, group and word how many messages came to it. One that came to two, such as parked and then
    handled, counts in both."""
    return outcomes.groupBy("topic", "group", "word").agg(F.sum(_messages()).alias("messages"))


def by_error(outcomes: DataFrame) -> DataFrame:
    """Return the dead letters per topic, group, word, error and actor, with their attempts."""
    dead = outcomes.filter(F.col("word").isin(*DEAD))
    return dead.groupBy("topic", "group", "word", F.coalesce("reason", F.lit("")).alias("reason"), "actor").agg(
        F.sum(_messages()).alias("messages"), F.sum(_messages() * F.col("attempts")).alias("attempts")
    )


def by_member(outcomes: DataFrame) -> DataFrame:
    """Return per topic, group and actor what it settled: messages, those of several attempts, attempts beyond the
    first, the most of one, and how many were parked or died."""
    tried, messages = F.col("attempts") > 1, _messages()
    return outcomes.groupBy("topic", "group", "actor").agg(
        F.sum(messages).alias("messages"),
        _sum(tried, messages).alias("retried"),
        _sum(tried, messages * (F.col("attempts") - 1)).alias("retries"),
        F.max("attempts").alias("most_attempts"),
        _sum(F.col("word") == "parked", messages).alias("parked"),
        _sum(F.col("word").isin(*DEAD), messages).alias("dead"),
    )


def by_attempts(outcomes: DataFrame) -> DataFrame:
    """Return per topic, group and number of attempts how many messages needed so many until they were handled."""
    handled = outcomes.filter(F.col("word") == "handled")
    return handled.groupBy("topic", "group", "attempts").agg(F.sum(_messages()).alias("messages"))


def _messages() -> Column:
    return F.col("last_offset") - F.col("first_offset") + 1


def _sum(which: Column, what: Column) -> Column:
    return F.coalesce(F.sum(F.when(which, what)), F.lit(0))
