"""Retries, parking and dead letters, by error and actor."""

from __future__ import annotations

from collections import Counter
from typing import Final

from mqlayer.spark.html_report import Bar, BarChart, Part, Section, Table, Tile, Tiles
from mqlayer.spark.jobs.job import JobParams, JobResult, SnapshotTables, rows_of
from mqlayer.spark.transforms.failures import DEAD, by_attempts, by_error, by_member, by_outcome, cases

BARS: Final = 15


def run(tables: SnapshotTables, _params: JobParams) -> JobResult:
    """Report failed messages and their outcomes."""
    looked = cases(tables.outcomes).persist()
    made = {"by_outcome": by_outcome, "errors": by_error, "members": by_member, "attempts": by_attempts}
    frames = {name: make(looked).persist() for name, make in made.items()}
    words = rows_of(frames["by_outcome"], "topic", "group", "-messages")
    errors = rows_of(frames["errors"], "-messages", "topic", "group", "outcome", "reason", "actor")
    members = rows_of(frames["members"], "-retries", "-dead", "topic", "group", "actor")
    attempts = rows_of(frames["attempts"], "topic", "group", "attempts")
    looked.unpersist()
    facts = {"by_outcome": words, "errors": errors, "members": members, "attempts": attempts}
    shown = {"messages by what became of them": words, "dead letters by error": errors, "members": members}
    sums = {word: sum(row["messages"] for row in words if row["outcome"] == word) for word in ("parked", "redriven")}
    dead = sum(row["final"] for row in words if row["outcome"] in DEAD)
    tiles = [Tile("retries", f"{sum(row['retries'] for row in members):,}"), Tile("parked", f"{sums['parked']:,}")]
    tiles += [Tile("dead in the end", f"{dead:,}", "bad" if dead else ""), Tile("redriven", f"{sums['redriven']:,}")]
    died = Counter[str]()
    for row in errors:
        died[f"{row['group']}: {row['reason'] or row['outcome']}"] += row["messages"]
    bars = [Bar(label, count, f"{count:,}") for label, count in died.most_common(BARS)]
    tried = [
        Bar(f"{row['group']}: {row['attempts']} attempts", row["messages"], f"{row['messages']:,}")
        for row in attempts
        if row["attempts"] > 1
    ]
    parts: list[Part] = [
        Tiles(tiles),
        BarChart("Dead letters by error", bars, nothing="none died"),
        BarChart("Handled after several attempts", tried[:BARS], nothing="all that was handled took one attempt"),
        Table("What became of messages", words),
        Table("Dead letters by error and member", errors, "none died"),
        Table("Retries by member", members),
    ]
    return JobResult("failures", facts, shown, Section("failures", "Retries, parking, dead letters", parts), frames)


if __name__ == "__main__":
    import sys

    from mqlayer.spark.jobs.runner import submit

    sys.exit(submit("failures"))
