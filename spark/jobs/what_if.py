"""A day on other routes, with other members, with automatic routes; see docs/how-to/try-routes.md."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from mqlayer.autopilot.simulated_queues import OTHER_KEYS, ArrivalCell, Arrivals, SimulatedMembers
from mqlayer.autopilot.simulated_topic import POINTS
from mqlayer.autopilot.what_if import Ranges, ScenarioResult, WhatIfParams, run_scenario, scenarios
from mqlayer.domain.routing import even_ranges
from mqlayer.errors import InvalidInput
from mqlayer.routes.split_report import read_split_report
from mqlayer.spark.html_report import LineChart, Note, Part, Section, Table
from mqlayer.spark.jobs.job import JobParams, JobResult, SnapshotTables, rows_of
from mqlayer.spark.transforms import arrivals as found_in

SLOTS: Final = 20_000
SLOT_LENGTHS_S: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1_800, 3_600)
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
CHANGES_SHOWN: Final = 200
CURVES: Final = 3
"""Scenarios per chart."""
SCENARIO_ROW: Final = (
    "scenario int, route string, members int, automatic boolean, capacity double, cool_down double, per_hour int, "
    "at_most int, splits int, merges int, partitions int, hottest_share double, lag_p99 bigint, lag_most bigint, "
    "wait_p50 double, wait_p99 double, behind_most double, left bigint, stopped string"
)
CURVE_ROW: Final = "scenario int, at timestamp, lag bigint, behind_s double, hottest_share double, partitions int"
CHANGE_ROW: Final = "scenario int, at_s double, kind string, partitions array<int>, reason string, helped boolean"

Row = Mapping[str, Any]
LagCurve = list[tuple[datetime, float]]


class GroupSpeed(NamedTuple):
    """A member's messages per second. `actors`: members in the snapshot."""

    per_s: float
    source: str
    actors: int


def run(tables: SnapshotTables, params: JobParams) -> JobResult:
    """Simulate scenarios. Raises InvalidInput for several topics, or missing facts."""
    asked = params.what_if
    topic, records = _one_topic(tables, asked)
    arrived = _arrivals(topic, records, asked)
    outcomes = tables.outcomes.filter(F.col("topic") == topic)
    group, speed = _speed(outcomes, asked)
    counts = asked.members or (speed.actors,)
    crews = [SimulatedMembers(count, speed.per_s, asked.concurrency, asked.by_rate) for count in counts]
    routes = _routes(tables, topic, params)
    results = [
        run_scenario(arrived, one, times=asked.times, pass_s=asked.pass_s)
        for one in scenarios(routes, crews, asked.thresholds)
    ]
    was = None if group is None else _as_it_was(outcomes, group, arrived)
    shown = [{"scenario": number, **one.row()} for number, one in enumerate(results, 1)]
    facts = {
        "topic": topic,
        "group": group,
        "slot_s": arrived.slot_s,
        "slots": arrived.slots,
        "messages": arrived.messages,
        "member_per_s": round(speed.per_s, 2),
        "member_per_s_from": speed.source,
        "hot_keys": list(arrived.keys),
        "as_it_was": was and was.facts,
        "scenarios": shown,
        "changes": [row for number, one in enumerate(results, 1) for row in _changes(number, one)][:CHANGES_SHOWN],
    }
    section = Section("what-if", "What if", _parts(facts, results, was))
    rows = {"scenarios": shown} | ({} if was is None else {"as it was": [was.facts]})
    return JobResult("what-if", facts, rows, section, _frames(tables, shown, results))


def _one_topic(tables: SnapshotTables, asked: WhatIfParams) -> tuple[str, DataFrame]:
    topics = [row["topic"] for row in rows_of(tables.lineage.select("topic").distinct(), "topic")]
    if len(topics) != 1:
        raise InvalidInput(f"what-if looks at one topic, the snapshot holds {len(topics)}: add --topic NAME")
    records = tables.records
    if asked.since is not None:
        records = records.filter(F.col("published_at") >= F.lit(asked.since))
    if asked.until is not None:
        records = records.filter(F.col("published_at") < F.lit(asked.until))
    return topics[0], records


def _arrivals(topic: str, records: DataFrame, asked: WhatIfParams) -> Arrivals:
    found = rows_of(found_in.span(records))
    if not found:
        raise InvalidInput(f"no message of topic {topic!r} was published then: name another --since or --until")
    began_us, last_us = found[0]["first_us"], found[0]["last_us"]
    slot_s = slot_length((last_us - began_us) / 1_000_000, asked.slot_s)
    hot = found_in.hot_keys(records).persist()
    keys = [row["key"] for row in rows_of(hot, "key")]
    cells = found_in.arrivals(records, hot, began_us, round(slot_s * 1_000_000))
    arrived = Arrivals.of(EPOCH + timedelta(microseconds=began_us), slot_s, keys, _cells(cells, keys))
    hot.unpersist()
    return arrived


def slot_length(span_s: float, wanted_s: float | None) -> float:
    """Return seconds. Raises InvalidInput for too many slots."""
    if wanted_s is not None:
        if span_s / wanted_s >= SLOTS:
            raise InvalidInput(
                f"{span_s:,.0f} s are {span_s / wanted_s:,.0f} slots, {SLOTS:,} are the most: a longer --slot, or "
                "--since and --until for a part"
            )
        return wanted_s
    return next((float(one) for one in SLOT_LENGTHS_S if span_s / one < SLOTS), math.ceil(span_s / (SLOTS - 1)))


def _cells(frame: DataFrame, keys: Sequence[str]) -> Iterator[ArrivalCell]:
    numbers: dict[str | None, int] = {key: number for number, key in enumerate(keys)} | {None: OTHER_KEYS}
    ordered = frame.orderBy("slot", "lp").select("slot", "lp", "hot_key", F.col("messages").cast("int"))
    for batch in ordered.toArrow().to_batches():
        slots, lps, named, messages = (column.to_pylist() for column in batch.columns)
        yield from map(ArrivalCell, slots, lps, (numbers[key] for key in named), messages)


def _speed(outcomes: DataFrame, asked: WhatIfParams) -> tuple[str | None, GroupSpeed]:
    rates = rows_of(found_in.member_rates(outcomes), "group", "actor")
    groups = sorted({row["group"] for row in rates})
    if asked.group is not None and asked.group not in groups:
        held = ", ".join(groups) or "none"
        raise InvalidInput(f"the snapshot has no messages that group {asked.group!r} handled; it has of {held}")
    if asked.group is None and len(groups) > 1:
        raise InvalidInput(f"several groups handled messages, {', '.join(groups)}: name one with --group")
    group = asked.group or next(iter(groups), None)
    own = [row["most_per_s"] for row in rates if row["group"] == group]
    if asked.member_per_s is not None:
        speed = GroupSpeed(asked.member_per_s, "as given", len(own))
    elif asked.handling_ms is not None:
        per_s = asked.concurrency * 1_000 / asked.handling_ms
        speed = GroupSpeed(per_s, f"{asked.handling_ms:g} ms a message, {asked.concurrency} at once", len(own))
    elif own:
        # Under skew the others have no backlog, so they show no limit.
        word = f"the best {found_in.RATE_S} s of {len(own)} members: their limit only with a backlog then"
        speed = GroupSpeed(max(own), word, len(own))
    else:
        raise InvalidInput("no group of the snapshot shows how fast a member is: --member-rate, or --handler-ms")
    if not own and not asked.members:
        raise InvalidInput("the snapshot does not show how many members there were: --members N")
    return group, speed


def _routes(tables: SnapshotTables, topic: str, params: JobParams) -> dict[str, Ranges]:
    asked = params.what_if
    lineage = rows_of(tables.lineage, "lp_from")
    newest = max(row["first_version"] for row in lineage)
    if asked.version is None:
        own = [row for row in lineage if row["last_version"] is None]
        name = "present"
    else:
        if not 1 <= asked.version <= newest:
            raise InvalidInput(f"topic {topic!r} has route versions 1 to {newest}, not {asked.version}")
        own = [row for row in lineage if _serves(row, asked.version)]
        name = f"version {asked.version}"
    found: dict[str, Ranges] = {f"{name}, {len(own)}": [(row["lp_from"], row["lp_to"]) for row in own]}
    for count in asked.partitions or (() if params.partitions is None else (params.partitions,)):
        found[f"even, {count}"] = even_ranges(count)
    if asked.split_report is not None:
        report = read_split_report(asked.split_report)
        if report.topic != topic:
            raise InvalidInput(f"the report is of topic {report.topic!r}, not of {topic!r}")
        bounds = sorted({bound for one in report.partitions for bound in (one.lp_from, *one.at, one.lp_to)})
        ranges = list(pairwise(bounds))
        found[f"split report, {len(ranges)}"] = ranges
    return found


def _serves(row: Row, version: int) -> bool:
    last = row["last_version"]
    return bool(row["first_version"] <= version and (last is None or version <= last))


class PastLag(NamedTuple):
    """The real lag."""

    curve: LagCurve
    facts: dict[str, Any]
    lags: Sequence[int]


def _as_it_was(outcomes: DataFrame, group: str, arrived: Arrivals) -> PastLag:
    own = outcomes.filter(F.col("group") == group)
    began_us = (arrived.began - EPOCH) // timedelta(microseconds=1)
    frame = found_in.settled_by_slot(own, began_us, round(arrived.slot_s * 1_000_000))
    settled = {row["slot"]: row["messages"] for row in rows_of(frame, "slot")}
    lags, lag = [], 0
    for slot in range(arrived.slots):
        lag += sum(messages for *_, messages in arrived.at(slot)) - settled.get(slot, 0)
        # Clocks differ, and what was published before may be settled now.
        lags.append(max(0, lag))
    ranked = sorted(lags)
    p99 = ranked[math.ceil(0.99 * len(ranked)) - 1]
    facts = {"group": group, "lag_p99": p99, "lag_most": ranked[-1], "left": lags[-1]}
    return PastLag(_points(arrived, lags), facts, lags)


def _points(arrived: Arrivals, values: Sequence[float]) -> LagCurve:
    step = max(1, math.ceil(arrived.slots / POINTS))
    return [(arrived.time_of(at), max(values[at : at + step])) for at in range(0, len(values), step)]


def _changes(number: int, result: ScenarioResult) -> list[dict[str, Any]]:
    names = ("at_s", "kind", "partitions", "reason", "helped")
    return [{"scenario": number, **{name: asdict(one)[name] for name in names}} for one in result.changes]


def _parts(facts: Row, results: Sequence[ScenarioResult], was: PastLag | None) -> list[Part]:
    arrived = results[0].run.arrivals
    best = sorted(range(len(results)), key=lambda at: (results[at].run.lag_p99, results[at].run.wait_s(0.99), at))
    drawn = list(dict.fromkeys([0, *best]))[:CURVES]
    names = {at: f"{at + 1}: {results[at].scenario.name}" for at in drawn}
    lags = {names[at]: _points(arrived, results[at].run.lags) for at in drawn}
    if was is not None:
        lags["as it was"] = was.curve
    behind = {names[at]: [(m, v * arrived.slot_s) for m, v in _points(arrived, results[at].run.behind)] for at in drawn}
    step_s = arrived.slot_s * results[0].run.step
    hottest = {names[at]: _by_point(results[at], results[at].run.hottest, percent=True) for at in drawn}
    counts = {names[at]: _by_point(results[at], results[at].run.partitions) for at in drawn}
    tones = (*range(len(drawn)), 3)
    hot = f"{len(arrived.keys)} hot keys are handled by one worker each. " if arrived.keys else ""
    parts: list[Part] = [
        Note(
            f"Topic {facts['topic']}: {facts['messages']:,} messages in slots of {arrived.slot_s:g} s; a member "
            f"handles {facts['member_per_s']:,} messages/s ({facts['member_per_s_from']}). {hot}Times are to one slot."
        ),
        Table("Scenarios: lag in messages, times in seconds", facts["scenarios"]),
    ]
    if was is not None:
        parts.append(Table("As it was", [was.facts]))
    parts += [
        LineChart("Lag", lags, "messages", step_s, tones),
        LineChart("Age of the oldest message", behind, "s", step_s, tones),
        LineChart("Hottest partition's share of arrivals", hottest, "%", step_s, tones),
        LineChart("Partitions", counts, "partitions", step_s, tones),
    ]
    parts += [
        LineChart(f"Lag of partitions: {names[at]}", _by_partition(results[at]), "messages", step_s)
        for at in drawn
        if results[at].run.curves
    ]
    return [*parts, Table("Changes", facts["changes"], "no scenario changes routes")]


def _by_point(result: ScenarioResult, values: Sequence[float], *, percent: bool = False) -> LagCurve:
    run = result.run
    return [(run.arrivals.time_of(at * run.step), value * (100 if percent else 1)) for at, value in enumerate(values)]


def _by_partition(result: ScenarioResult) -> dict[str, LagCurve]:
    """Return the longest lags."""
    run = result.run
    worst = sorted(run.curves, key=lambda number: (-max(run.curves[number].values()), number))[: CURVES + 1]
    return {
        f"partition {number}": [(run.arrivals.time_of(at * run.step), lag) for at, lag in run.curves[number].items()]
        for number in worst
    }


def _frames(tables: SnapshotTables, shown: Sequence[Row], results: Sequence[ScenarioResult]) -> dict[str, DataFrame]:
    spark = tables.records.sparkSession
    curves = []
    for number, one in enumerate(results, 1):
        run, step = one.run, one.run.step
        for at, (share, partitions) in enumerate(zip(run.hottest, run.partitions, strict=True)):
            part = slice(at * step, (at + 1) * step)
            behind_s = max(run.behind[part]) * run.arrivals.slot_s
            moment = run.arrivals.time_of(at * step)
            curves.append((number, moment, max(run.lags[part]), behind_s, share, partitions))
    changes = [tuple(row.values()) for number, one in enumerate(results, 1) for row in _changes(number, one)]
    names = [part.split()[0] for part in SCENARIO_ROW.split(", ")]
    rows = [tuple(row[name] for name in names) for row in shown]
    return {
        "scenarios": spark.createDataFrame(rows, SCENARIO_ROW),
        "curves": spark.createDataFrame(curves, CURVE_ROW),
        "changes": spark.createDataFrame(changes, CHANGE_ROW),
    }


if __name__ == "__main__":
    import sys

    from mqlayer.spark.jobs.runner import submit

    sys.exit(submit("what-if"))
