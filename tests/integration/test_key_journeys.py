"""Key journeys against a small truth, computed by hand, and their links into the console."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from mqlayer.errors import InvalidInput
from tests.fixtures.archived_topics import BEGAN, LINEAGE, OUTCOMES, RECORDS, ArchivedTopic, Row
from tests.fixtures.missing_tools import import_or_leave_out

import_or_leave_out("pyspark")

CONSOLE = "https://console.example/mq"


def at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


def event(offset: int, outcome: str, settled_s: float, delivered_s: float | None = None, attempts: int = 1) -> Row:
    """Return what became of an offset of partition 1 of `orders` in the group `billing`."""
    return {
        "topic": "orders", "group": "billing", "partition": 1, "first_offset": offset, "last_offset": offset,
        "outcome": outcome, "attempts": attempts, "delivered_at": None if delivered_s is None else at(delivered_s),
        "settled_at": at(settled_s), "actor": "m1", "reason": None, "epoch": 1, "position": int(settled_s * 10),
    }  # fmt: skip


EVENTS = [
    event(1, "handled", 1.5, 1),
    event(2, "parked", 5, attempts=3),
    event(2, "handled", 66, 65, attempts=4),
    event(3, "exhausted", 12, attempts=5),
    event(3, "redriven", 100, attempts=5),
    event(3, "handled", 103, 101),
    event(4, "unmatched", 11, attempts=0),
    event(5, "handled", 21, 19),  # by a clock that is behind
    event(6, "replayed", 1_000, attempts=0),
    event(6, "handled", 1_003, 1_002),
    event(1, "handled", 500, 499),  # again, after a seek
]
TRUTH = {
    1: {"stream": 1_000, "attempts": 500},
    2: {"failing": 5_000, "parking": 60_000, "attempts": 1_000},
    3: {"failing": 2_000, "dead": 88_000, "parking": 1_000, "attempts": 2_000},
    4: {"stream": 1_000},
    5: {"stream": 0, "attempts": 2_000},
    6: {"parking": 2_000, "attempts": 1_000},
}
"""Milliseconds of each message's stages."""


@pytest.fixture
def tables(spark: Any) -> Any:
    """Six messages, each archived two seconds after it was published."""
    from mqlayer.spark.jobs.job import SnapshotTables

    topic = ArchivedTopic(partitions=1)
    for key, after_s in (("k1", 0), ("k1", 0), ("k2", 10), ("k2", 10), (None, 20), ("k3", 0)):
        topic.publish(key, after_s=after_s)
    rows = [row | {"archived_at": row["published_at"] + timedelta(seconds=2)} for row in topic.records]
    records = spark.createDataFrame(rows, f"{RECORDS}, archived_at timestamp")
    return SnapshotTables(
        "s", records, spark.createDataFrame(EVENTS, OUTCOMES), spark.createDataFrame(topic.lineage, LINEAGE)
    )


def test_each_message_s_time_is_divided_into_stages(spark: Any, tables: Any) -> None:
    from mqlayer.spark.transforms.journeys import STAGES, by_key, by_stage, journeys

    found = journeys(tables.records, tables.outcomes).persist()
    rows = {row.offset: row.asDict() for row in found.collect()}
    passed = {
        offset: {stage: row[f"{stage}_ms"] for stage in STAGES if row[f"{stage}_ms"] is not None}
        for offset, row in rows.items()
    }
    assert passed == TRUTH
    assert {offset: row["total_ms"] for offset, row in rows.items()} == {
        offset: sum(stages.values()) for offset, stages in TRUTH.items()
    }
    # Delivered before it was archived, or archived before its first outcome.
    assert {offset: row["outbox_most_ms"] for offset, row in rows.items()} == {
        1: 1_000, 2: 2_000, 3: 2_000, 4: 1_000, 5: 0, 6: 2_000,
    }  # fmt: skip
    assert [(rows[2][name], rows[3][name]) for name in ("attempts", "parkings", "outcome")] == [
        (4, 5), (1, 0), ("handled", "handled"),
    ]  # fmt: skip
    stages = {row.stage: row for row in by_stage(found).collect()}
    assert {stage: (row.messages, row.longest_ms, row.sum_s) for stage, row in stages.items()} == {
        "stream": (3, 1_000, 2.0), "failing": (2, 5_000, 7.0), "attempts": (5, 2_000, 6.5),
        "parking": (3, 60_000, 63.0), "dead": (1, 88_000, 88.0),
    }  # fmt: skip
    assert stages["attempts"].p50_ms == 1_000
    assert stages["parking"].p95_ms == pytest.approx(2_000 + 0.9 * 58_000)
    assert stages["dead"].share == pytest.approx(88 / 166.5)
    keys = {row.key: (row.messages, row.total_ms, row.longest_ms, row.parkings) for row in by_key(found).collect()}
    assert keys == {"k1": (2, 67_500, 66_000, 1), "k2": (2, 94_000, 93_000, 0), "k3": (1, 3_000, 3_000, 0)}
    found.unpersist()


@pytest.mark.full
def test_the_worst_come_first_and_link_to_the_console(spark: Any, tables: Any) -> None:
    from mqlayer.spark.jobs.job import JobParams
    from mqlayer.spark.jobs.journeys import run

    source_lp_seq = {row.offset: f"{row.source}:{row.lp}:{row.seq}" for row in tables.records.collect()}
    found = run(tables, JobParams(console=f"{CONSOLE}/"))
    assert [row["key"] for row in found.facts["keys"]] == ["k2", "k1", "k3"]
    assert found.facts["keys"][0]["console"] == f"{CONSOLE}/keys?topic=orders&key=k2&group=billing"
    worst = found.facts["messages"]
    assert [row["message"] for row in worst] == [source_lp_seq[offset] for offset in (3, 2, 6, 5, 1, 4)]
    assert worst[0]["console"] == f"{CONSOLE}/messages/orders/{source_lp_seq[3].replace(':', '%3A')}"
    page = found.section.html()
    assert f'<a href="{CONSOLE}/keys?topic=orders&amp;key=k2&amp;group=billing">k2</a>' in page
    assert page.count("<a ") == 3 + 6
    found.release()
    plain = run(tables, JobParams())
    assert "console" not in plain.facts["keys"][0]
    assert "<a " not in plain.section.html()
    plain.release()
    with pytest.raises(InvalidInput, match="begin it with https"):
        run(tables, JobParams(console="javascript:alert(1)"))
