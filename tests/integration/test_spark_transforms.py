"""Each transform of the Spark jobs against a small truth, computed by hand."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from mqlayer.domain.routing import lp_of
from mqlayer.spark.transforms import failures, fairness, heat, latency
from tests.fixtures.archived_topics import BEGAN, LINEAGE, OUTCOMES, RECORDS, ArchivedTopic, Row


def outcome(first: int, last: int, settled_s: float, **facts: Any) -> Row:
    """Return a stretch of offsets of partition 1 of `orders` that the group `billing` handled."""
    row: Row = {
        "topic": "orders",
        "group": "billing",
        "partition": 1,
        "first_offset": first,
        "last_offset": last,
        "outcome": "handled",
        "attempts": 1,
        "delivered_at": at(settled_s - 1),
        "settled_at": at(settled_s),
        "actor": "m1",
        "reason": None,
        "epoch": 1,
        "position": int(settled_s * 10),
    }
    return row | facts


def at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


def rows_of(frame: Any, *by: str) -> list[Row]:
    return [row.asDict() for row in frame.orderBy(*by).collect()]


@pytest.fixture
def records(spark: Any) -> Any:
    """Ten messages of one LP, published one a second from 10:00:00."""
    topic = ArchivedTopic(partitions=1)
    for number in range(10):
        topic.publish("k1", after_s=number)
    return spark.createDataFrame(topic.records, RECORDS)


def test_latency_is_from_publishing_to_the_first_time_that_a_group_handled_it(spark: Any, records: Any) -> None:
    """Of ten messages one is left out, one parked and handled later; two are handled again after a seek."""
    outcomes = [
        outcome(1, 4, 4.5),  # 4500, 3500, 2500, 1500 ms
        outcome(5, 5, 5, outcome="unmatched", delivered_at=None),
        outcome(6, 6, 6, outcome="parked"),
        outcome(6, 6, 65.25, attempts=3),  # 60250 ms
        outcome(7, 10, 61),  # 55000, 54000, 53000, 52000 ms
        outcome(1, 2, 500),
    ]
    settled = latency.settled(records, spark.createDataFrame(outcomes, OUTCOMES))
    (whole,) = rows_of(latency.latency(settled), "group")
    # In order: 1500 2500 3500 4500 52000 53000 54000 55000 60250
    assert whole == {
        "topic": "orders",
        "group": "billing",
        "messages": 9,
        "p50_ms": 52_000.0,
        "p95_ms": pytest.approx(55_000 + 0.6 * 5_250),
        "p99_ms": pytest.approx(55_000 + 0.92 * 5_250),
        "longest_ms": 60_250,
    }
    first, second = rows_of(latency.by_minute(settled), "minute")
    assert (first["messages"], first["p50_ms"], first["longest_ms"]) == (4, 3_000.0, 4_500)
    assert first["per_s"] == pytest.approx(4 / 60)
    assert (second["messages"], second["p50_ms"]) == (5, 54_000.0)
    assert (second["minute"] - first["minute"]).total_seconds() == 60


@pytest.mark.full
def test_a_long_stretch_of_offsets_is_every_one_of_them(spark: Any) -> None:
    long = spark.createDataFrame([outcome(3, 5_002, 1), outcome(7, 7, 1, group="audit")], OUTCOMES)
    found = latency.per_offset(long)
    per_group = {row["group"]: row for row in found.groupBy("group").agg(*counted(spark)).collect()}
    assert (per_group["billing"]["n"], per_group["billing"]["lo"], per_group["billing"]["hi"]) == (5_000, 3, 5_002)
    assert (per_group["audit"]["n"], per_group["audit"]["lo"]) == (1, 7)
    assert per_group["billing"]["distinct"] == 5_000


def counted(spark: Any) -> list[Any]:
    from pyspark.sql import functions as F  # noqa: N812

    return [
        F.count("*").alias("n"),
        F.min("offset").alias("lo"),
        F.max("offset").alias("hi"),
        F.count_distinct("offset").alias("distinct"),
    ]


@pytest.mark.full
def test_a_clock_that_is_behind_gives_no_negative_latency(spark: Any, records: Any) -> None:
    settled = latency.settled(records, spark.createDataFrame([outcome(10, 10, 2)], OUTCOMES))
    (row,) = rows_of(latency.latency(settled), "group")
    assert (row["p50_ms"], row["longest_ms"]) == (0.0, 0)


def test_published_messages_are_counted_per_minute(spark: Any) -> None:
    topic = ArchivedTopic(partitions=1)
    for second in (0, 59, 60, 61, 119):
        topic.publish("k1", after_s=second)
    rows = rows_of(latency.published_by_minute(spark.createDataFrame(topic.records, RECORDS)), "minute")
    assert [row["messages"] for row in rows] == [2, 3]
    assert rows[1]["per_s"] == 0.05


def test_heat_is_counted_per_lp_key_and_partition_in_force(spark: Any) -> None:
    topic = ArchivedTopic(partitions=1)
    topic.publish(*["k1"] * 6, "k2", "k2", None, None)
    topic.split(1, 512)
    topic.publish("k1")
    records, lineage = spark.createDataFrame(topic.records, RECORDS), spark.createDataFrame(topic.lineage, LINEAGE)
    per_lp = heat.lp_heat(records)
    assert {row["lp"]: (row["records"], row["keys"]) for row in per_lp.collect()} == {
        lp_of(b"k1"): (7, 1), lp_of(b"k2"): (2, 1), 0: (2, 0),
    }  # fmt: skip
    first, second = rows_of(heat.hottest_keys(records), "rank")
    assert (first["key"], first["records"], first["lp"]) == ("k1", 7, lp_of(b"k1"))
    assert first["share"] == pytest.approx(7 / 11)
    assert (second["key"], second["rank"]) == ("k2", 2)
    partitions = {
        row["partition"]: row["records"] for row in rows_of(heat.partition_heat(per_lp, lineage), "partition")
    }
    below = sum(count for lp, count in ((lp_of(b"k1"), 7), (lp_of(b"k2"), 2), (0, 2)) if lp < 512)
    assert partitions == {2: below, 3: 11 - below}


def test_failures_are_counted_by_word_error_and_member(spark: Any) -> None:
    outcomes = [
        outcome(1, 10, 1),
        outcome(11, 11, 2, attempts=3),
        outcome(12, 12, 3, outcome="parked", attempts=17),
        outcome(12, 12, 9, attempts=18, actor="m2"),
        outcome(13, 14, 4, outcome="exhausted", attempts=5, reason="ValueError"),
        outcome(15, 15, 5, outcome="exhausted", attempts=2, reason="ValueError"),
        outcome(16, 16, 5, outcome="skipped", attempts=0, actor="operator", reason=None),
        # Given back and handled at the second attempt, by a clock that is behind; the other one stays dead.
        outcome(13, 13, 3, outcome="redriven", attempts=5, actor="operator", epoch=2),
        outcome(13, 13, 2, attempts=2, actor="m2", epoch=3),
        outcome(14, 14, 9, outcome="discarded", attempts=5, actor="operator", reason="no use", epoch=2),
    ]
    frame = failures.cases(spark.createDataFrame(outcomes, OUTCOMES))
    assert {row["outcome"]: (row["messages"], row["final"]) for row in failures.by_outcome(frame).collect()} == {
        "handled": (13, 13), "parked": (1, 0), "exhausted": (3, 1), "skipped": (1, 1), "redriven": (1, 0),
        "discarded": (1, 1),
    }  # fmt: skip
    dead = {
        (row["outcome"], row["reason"], row["actor"]): (row["messages"], row["attempts"], row["final"])
        for row in failures.by_error(frame).collect()
    }
    assert dead == {
        ("exhausted", "ValueError", "m1"): (3, 12, 1), ("skipped", "", "operator"): (1, 0, 1),
        ("discarded", "no use", "operator"): (1, 5, 1),
    }  # fmt: skip
    members = {row["actor"]: row.asDict() for row in failures.by_member(frame).collect()}
    wanted = {"messages": 15, "retried": 5, "retries": 2 + 16 + 8 + 1, "most_attempts": 17, "parked": 1, "dead": 3}
    assert {name: members["m1"][name] for name in wanted} == wanted
    assert (members["m2"]["retried"], members["m2"]["retries"], members["m2"]["dead"]) == (2, 1 + 1, 0)
    assert (members["operator"]["dead"], members["operator"]["retries"]) == (2, 0)
    attempts = {row["attempts"]: row["messages"] for row in failures.by_attempts(frame).collect()}
    assert attempts == {1: 10, 2: 1, 3: 1, 18: 1}


@pytest.mark.full
def test_fairness_counts_messages_and_busy_time_once(spark: Any) -> None:
    """m1 is busy from 0 to 10 (two overlap) and from 20 to 21; m2 from 0 to 1, and handles one that it was given before
    the topic was archived: it counts, its time is not known; m3 settles what it never handled."""
    outcomes = [
        outcome(1, 6, 10, delivered_at=at(0)),
        outcome(7, 7, 5, delivered_at=at(2)),
        outcome(8, 8, 21, delivered_at=at(20)),
        outcome(9, 9, 1, delivered_at=at(0), actor="m2"),
        outcome(10, 10, 0.5, delivered_at=None, actor="m2"),
        outcome(11, 11, 1, delivered_at=None, outcome="unmatched", actor="m3"),
    ]
    members = fairness.by_member(spark.createDataFrame(outcomes, OUTCOMES))
    assert {row["actor"]: (row["messages"], row["busy_s"], row["share"]) for row in members.collect()} == {
        "m1": (8, 11.0, 0.8), "m2": (2, 1.0, 0.2),
    }  # fmt: skip
    (group,) = rows_of(fairness.by_group(members), "group")
    assert (group["members"], group["messages"], group["max_to_mean"]) == (2, 10, 1.6)
    assert group["gini_messages"] == pytest.approx(0.3)  # |8 - 2| / (2 * 2 * 5) * 2 / 2
    assert group["gini_busy"] == pytest.approx(10 / 24)


@pytest.mark.full
def test_members_that_do_the_same_have_a_gini_of_zero(spark: Any) -> None:
    outcomes = [outcome(number, number, 1, actor=f"m{number}", delivered_at=at(0)) for number in range(1, 5)]
    (group,) = rows_of(fairness.by_group(fairness.by_member(spark.createDataFrame(outcomes, OUTCOMES))), "group")
    assert group["gini_messages"] == pytest.approx(0)
    assert group["max_to_mean"] == 1.0
