"""The job `what-if` on Spark: arrivals and speeds against small truths, and its answers."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mqlayer.autopilot.what_if import AutoThresholds, WhatIfParams
from mqlayer.domain.routing import lp_of
from mqlayer.errors import InvalidInput
from tests.fixtures.archived_topics import BEGAN, LINEAGE, OUTCOMES, RECORDS, ArchivedTopic, Row

pytestmark = pytest.mark.timeout(240)


def handled(first: int, last: int, settled_s: float, *, actor: str = "m1", partition: int = 1, **facts: Any) -> Row:
    row: Row = {
        "topic": "orders", "group": "billing", "partition": partition, "first_offset": first, "last_offset": last,
        "outcome": "handled", "attempts": 1, "delivered_at": at(settled_s - 1), "settled_at": at(settled_s),
        "actor": actor, "reason": None, "epoch": 1, "position": first,
    }  # fmt: skip
    return row | facts


def at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


def found_rows(frame: Any, *by: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in frame.orderBy(*by).collect()]


def tables_of(spark: Any, topic: ArchivedTopic, outcomes: list[Row]) -> Any:
    from mqlayer.spark.jobs.job import SnapshotTables

    return SnapshotTables(
        "nightly",
        spark.createDataFrame(topic.records, RECORDS),
        spark.createDataFrame(outcomes, OUTCOMES),
        spark.createDataFrame(topic.lineage, LINEAGE),
    )


@pytest.fixture
def day(spark: Any) -> Any:
    """Four seconds of a topic: 5, 1, 0, 2 messages of a hot key, one of another and one without a key; a split."""
    topic = ArchivedTopic(partitions=1)
    for second, count in enumerate((5, 1, 0, 2)):
        topic.publish(*["hot"] * count, after_s=second + 0.25)
    topic.publish("cold", None, after_s=3.5)
    topic.split(1, 512)
    outcomes = [
        handled(1, 4, 1.1),
        handled(5, 5, 2.1, actor="m2"),
        handled(6, 6, 2.2, outcome="parked"),
        handled(6, 6, 13.0, actor="m2"),
        handled(1, 2, 30.0),
    ]
    return tables_of(spark, topic, outcomes)


def test_arrivals_and_speeds_are_those_computed_by_hand(day: Any) -> None:
    from mqlayer.spark.transforms import arrivals

    began_us = int(at(0.25).timestamp() * 1_000_000)
    ((records, first_us, last_us),) = found_rows(arrivals.span(day.records).drop("topic"), "records")
    assert (records, first_us, last_us) == (10, began_us, began_us + 3_250_000)
    hot = arrivals.hot_keys(day.records, 0.2)
    assert found_rows(hot, "key") == [("orders", "hot", 8, 0.8)]
    per_slot = arrivals.arrivals(day.records, hot, began_us, 1_000_000).drop("topic")
    hot_lp, cold_lp = lp_of(b"hot"), lp_of(b"cold")
    assert sorted(found_rows(per_slot, "slot"), key=str) == sorted(
        [(0, hot_lp, "hot", 5), (1, hot_lp, "hot", 1), (3, hot_lp, "hot", 2), (3, cold_lp, None, 1), (3, 0, None, 1)],
        key=str,
    )
    settled = arrivals.settled_by_slot(day.outcomes, began_us, 1_000_000)
    assert found_rows(settled, "slot") == [("orders", "billing", 0, 4), ("orders", "billing", 1, 2)], "each once"
    rates = found_rows(arrivals.member_rates(day.outcomes).drop("topic", "group"), "actor")
    assert rates == [("m1", 6, 0.4), ("m2", 2, 0.1)]


def test_scenarios_are_answered_with_figures_charts_and_what_was(day: Any) -> None:
    from mqlayer.spark.jobs.job import JobParams
    from mqlayer.spark.jobs.what_if import run

    asked = WhatIfParams(
        partitions=(4,), members=(1, 2), member_per_s=2.0, concurrency=2, slot_s=1.0, thresholds=AutoThresholds()
    )
    found = run(day, JobParams(what_if=asked))
    scenarios = [(row["route"], row["members"], row["automatic"]) for row in found.facts["scenarios"]]
    assert scenarios == [
        (route, members, auto) for route in ("present, 2", "even, 4") for members in (1, 2) for auto in (False, True)
    ]
    # The hot key gets one message per second: 4, 4, 3, 4 of it are left; of the others one, if one member has all.
    left = {(row["members"], row["lag_most"], row["left"], row["splits"]) for row in found.facts["scenarios"]}
    assert left == {(1, 5, 5, 0), (2, 4, 4, 0)}
    assert (found.facts["group"], found.facts["hot_keys"]) == ("billing", ["cold", "hot"])
    assert found.facts["as_it_was"] == {"group": "billing", "lag_p99": 4, "lag_most": 4, "left": 4}
    page = found.section.html()
    assert "Hottest partition" in page
    assert page.count("<svg") >= 5
    assert found.frames["scenarios"].count() == 8
    assert json.dumps(found.facts)


@pytest.mark.full
def test_what_a_snapshot_does_not_show_has_to_be_said(spark: Any, day: Any, tmp_path: Path) -> None:
    from mqlayer.spark.jobs.job import JobParams
    from mqlayer.spark.jobs.what_if import run, slot_length

    def refused(tables: Any, *, file: Path | None = None, **asked: Any) -> str:
        with pytest.raises(InvalidInput) as error:
            run(tables, JobParams(what_if=WhatIfParams(split_report=file, **asked)))
        return str(error.value)

    quiet = tables_of(spark, ArchivedTopic(partitions=1), [])
    quiet = type(quiet)("nightly", day.records, quiet.outcomes, day.lineage)
    assert "--member-rate, or --handler-ms" in refused(quiet)
    assert "--members N" in refused(quiet, member_per_s=5.0)
    assert "it has of billing" in refused(day, group="audit")
    assert "route versions 1 to 2, not 3" in refused(day, version=3)
    assert "name another --since or --until" in refused(day, since=at(60))
    assert "a longer --slot" in refused(day, slot_s=0.0001)
    report = tmp_path / "split.json"
    report.write_text('{"kind": "mqlayer split report 1", "snapshot": "s", "topic": "x", "version": 1, "wanted": 1, '
                      '"partitions": []}')  # fmt: skip
    assert "the report is of topic 'x', not of 'orders'" in refused(day, file=report)
    assert [slot_length(seconds, None) for seconds in (4, 86_400, 10**8)] == [1.0, 5.0, 5_001]
    measured = run(day, JobParams(what_if=WhatIfParams(version=1, slot_s=1.0)))
    assert (measured.facts["member_per_s"], measured.facts["scenarios"][0]["members"]) == (0.4, 2)
    assert measured.facts["scenarios"][0]["route"] == "version 1, 1"
