"""Key skew, LP heat, and splits that balance a topic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from mqlayer.domain.routing import LP_COUNT
from mqlayer.domain.split_points import balancing_points, part_loads
from mqlayer.errors import InvalidInput
from mqlayer.routes.split_report import PartitionSplit, SplitReport, write_split_report
from mqlayer.spark.html_report import Bar, BarChart, LpChart, Note, Part, Section, Table, Tile, Tiles
from mqlayer.spark.jobs.job import JobParams, JobResult, SnapshotTables, rows_of
from mqlayer.spark.transforms.heat import hottest_keys, lp_heat, partition_heat

Row = Mapping[str, Any]

CHARTS: Final = 12
MAX_KEYS_SHOWN: Final = 15
# From this share on, a key is reported: no split helps against it.
HOT_SHARE: Final = 0.05


def run(tables: SnapshotTables, params: JobParams) -> JobResult:
    """Report topics' load; plan splits for `params.partitions`, default twice the present.

    Raises InvalidInput for a report file unless there is one topic.
    """
    heat = lp_heat(tables.records).persist()
    frames = {
        "lps": heat,
        "keys": hottest_keys(tables.records).persist(),
        "partitions": partition_heat(heat, tables.lineage).persist(),
    }
    lps, keys = rows_of(heat, "topic", "lp"), rows_of(frames["keys"], "topic", "rank")
    partitions = rows_of(frames["partitions"], "topic", "lp_from")
    versions = {row["topic"]: row["version"] for row in rows_of(_versions(tables))}
    reports = [
        _report(tables.snapshot, topic, version, _of(lps, topic), _of(partitions, topic), params.partitions)
        for topic, version in sorted(versions.items())
    ]
    if params.split_report is not None:
        if len(reports) != 1:
            raise InvalidInput(f"a split report is of one topic, the snapshot holds {len(reports)}: add --topic NAME")
        write_split_report(params.split_report, reports[0])
    shown = [_partition(report.topic, one) for report in reports for one in report.partitions]
    parts = [
        part for report in reports[:CHARTS] for part in _parts(report, _of(lps, report.topic), _of(keys, report.topic))
    ]
    facts = {
        "topics": msgspec.to_builtins(reports),
        "hottest_keys": [row for row in keys if row["rank"] <= MAX_KEYS_SHOWN],
    }
    hot = [{name: row[name] for name in ("topic", "key", "lp", "records", "share")} for row in keys if row["rank"] <= 5]
    section = Section("skew", "Skew and heat", parts)
    return JobResult("skew", facts, {"partitions": shown, "hottest keys": hot}, section, frames)


def _versions(tables: SnapshotTables) -> Any:
    return (
        tables.lineage.groupBy("topic").agg({"first_version": "max"}).withColumnRenamed("max(first_version)", "version")
    )


def _of(rows: Sequence[Row], topic: str) -> list[Row]:
    return [row for row in rows if row["topic"] == topic]


def _report(
    snapshot: str, topic: str, version: int, lps: Sequence[Row], partitions: Sequence[Row], wanted: int | None
) -> SplitReport:
    loads = {row["lp"]: row["records"] for row in lps}
    ranges = [(row["lp_from"], row["lp_to"]) for row in partitions]
    wanted = 2 * len(ranges) if wanted is None else wanted
    points = balancing_points(loads, ranges, wanted)
    return SplitReport(
        snapshot=snapshot,
        topic=topic,
        version=version,
        wanted=wanted,
        partitions=tuple(
            PartitionSplit(
                partition=row["partition"],
                lp_from=row["lp_from"],
                lp_to=row["lp_to"],
                records=row["records"],
                at=tuple(points[r]),
                loads=tuple(part_loads(loads, *r, points[r])),
            )
            for row, r in zip(partitions, ranges, strict=True)
        ),
    )


def _partition(topic: str, one: PartitionSplit) -> Row:
    return {
        "topic": topic,
        "partition": one.partition,
        "LPs": f"[{one.lp_from}, {one.lp_to})",
        "records": one.records,
        "split_at": ", ".join(map(str, one.at)),
        "would_have": ", ".join(f"{load:,}" for load in one.loads) if one.at else "",
    }


def _parts(report: SplitReport, lps: Sequence[Row], keys: Sequence[Row]) -> list[Part]:
    loads = {row["lp"]: row["records"] for row in lps}
    pieces = [load for one in report.partitions for load in one.loads]
    heaviest_now = max((one.records for one in report.partitions), default=0)
    tiles = Tiles([
        Tile("records", f"{sum(loads.values()):,}"),
        Tile("LPs with records", f"{len(loads):,}"),
        Tile("partitions now", str(len(report.partitions))),
        Tile("heaviest now / mean", _to_mean([one.records for one in report.partitions])),
        Tile(f"heaviest of {len(pieces)} after the splits", f"{max(pieces, default=0):,} of {heaviest_now:,}"),
    ])  # fmt: skip
    strip = LpChart(
        f"{report.topic}: heat",
        loads,
        LP_COUNT,
        [one.lp_from for one in report.partitions if one.lp_from],
        [point for one in report.partitions for point in one.at],
    )
    bars = [
        Bar(row["key"], row["records"], f"{row['records']:,} · {row['share']:.1%}") for row in keys[:MAX_KEYS_SHOWN]
    ]
    parts: list[Part] = [Note(f"Topic {report.topic}, route version {report.version}."), tiles, strip]
    parts.append(Table("Partitions and their splits", [_partition(report.topic, one) for one in report.partitions]))
    if keys and keys[0]["share"] >= HOT_SHARE:
        parts.append(Note(f"The hottest key has {keys[0]['share']:.0%} of all records: no split parts one key."))
    return [*parts, BarChart(f"{report.topic}: hottest keys", bars, nothing="no message has a key")]


def _to_mean(loads: Sequence[int]) -> str:
    total = sum(loads)
    return f"{max(loads) * len(loads) / total:.2f}" if total else "-"


if __name__ == "__main__":
    import sys

    from mqlayer.spark.jobs.runner import submit

    sys.exit(submit("skew"))
