"""How a group's work spreads over its members."""

from __future__ import annotations

from typing import Any, Final

from mqlayer.spark.html_report import Bar, BarChart, Note, Part, Section, Table
from mqlayer.spark.jobs.job import JobParams, JobResult, SnapshotTables, rows_of
from mqlayer.spark.transforms.fairness import by_group, by_member

CHARTS: Final = 12
BARS: Final = 40


def run(tables: SnapshotTables, _params: JobParams) -> JobResult:
    """Report members' messages and busy time."""
    members = by_member(tables.outcomes).persist()
    frames = {"members": members, "groups": by_group(members).persist()}
    each = [_rounded(row) for row in rows_of(members, "topic", "group", "-messages", "actor")]
    groups = [_rounded(row) for row in rows_of(frames["groups"], "-messages", "topic", "group")]
    parts: list[Part] = [
        Note("Gini 0: all members did the same. Near 1: one did it all. Busy: with at least one message in hand."),
        Table("Groups", groups, "no group handled anything of this snapshot"),
    ]
    for group in groups[:CHARTS]:
        own = [row for row in each if (row["topic"], row["group"]) == (group["topic"], group["group"])]
        bars = [
            Bar(
                row["actor"], row["messages"], f"{row['messages']:,} · {row['share']:.1%} · busy {row['busy_s']:,.1f} s"
            )
            for row in own[:BARS]
        ]
        mean = group["messages"] / group["members"]
        parts.append(BarChart(f"{group['topic']} → {group['group']}: messages by member", bars, mean))
    section = Section("fairness", "Fairness", parts)
    return JobResult(
        "fairness", {"groups": groups, "members": each}, {"groups": groups, "members": each}, section, frames
    )


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


if __name__ == "__main__":
    import sys

    from mqlayer.spark.jobs.runner import submit

    sys.exit(submit("fairness"))
