"""Throughput and latency per topic, group and minute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from mqlayer.spark.html_report import LineChart, Note, Part, Section, Table
from mqlayer.spark.jobs.job import JobParams, JobResult, SnapshotTables, rows_of
from mqlayer.spark.transforms.latency import by_minute, latency, published_by_minute, settled

CHARTS: Final = 12


def run(tables: SnapshotTables, _params: JobParams) -> JobResult:
    """Report groups' messages per minute and latency."""
    handled = settled(tables.records, tables.outcomes).persist()
    frames = {
        "groups": latency(handled).persist(),
        "minutes": by_minute(handled).persist(),
        "published": published_by_minute(tables.records).persist(),
    }
    groups = rows_of(frames["groups"], "-messages", "topic", "group")
    minutes = rows_of(frames["minutes"], "minute")
    published = rows_of(frames["published"], "minute")
    handled.unpersist()
    rounded = [{name: _rounded(value) for name, value in row.items()} for row in groups]
    section = Section("latency", "Throughput and latency", _parts(rounded, minutes, published))
    return JobResult("latency", {"groups": rounded}, {"latency": rounded}, section, frames)


def _parts(
    groups: Sequence[dict[str, Any]], minutes: Sequence[dict[str, Any]], published: Sequence[dict[str, Any]]
) -> list[Part]:
    parts: list[Part] = [
        Note("From publishing, by the publisher's clock, to the first time that the group had handled the message."),
        Table("Groups", groups, "no group handled anything of this snapshot"),
    ]
    for row in groups[:CHARTS]:
        topic, group = row["topic"], row["group"]
        own = [one for one in minutes if (one["topic"], one["group"]) == (topic, group)]
        series = {name: [(one["minute"], one[f"{name}_ms"]) for one in own] for name in ("p50", "p95", "p99")}
        parts.append(LineChart(f"{topic} → {group}: latency", series, "ms"))
        rates = {
            "published": [(one["minute"], one["per_s"]) for one in published if one["topic"] == topic],
            "handled": [(one["minute"], one["per_s"]) for one in own],
        }
        parts.append(LineChart(f"{topic} → {group}: throughput", rates, "messages/s", tones=(3, 1)))
    if len(groups) > CHARTS:
        parts.append(Note(f"{len(groups) - CHARTS} more groups are in the table and the Parquet files."))
    return parts


def _rounded(value: Any) -> Any:
    return round(value, 1) if isinstance(value, float) else value


if __name__ == "__main__":
    import sys

    from mqlayer.spark.jobs.runner import submit

    sys.exit(submit("latency"))
