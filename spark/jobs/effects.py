"""The effect audit: outcomes beside the rows of fence and inbox; docs/how-to/analyze.md explains its words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mqlayer.errors import InvalidInput
from mqlayer.spark.html_report import Bar, BarChart, Note, Part, Section, Table, Tile, Tiles
from mqlayer.spark.jobs.job import JobParams, JobResult, SnapshotTables, rows_of
from mqlayer.spark.transforms import effects

MAX_SHOWN: Final = 200
HORIZON: Final = "7 days"
"""How long the fence keeps rows; the inbox keeps them so long at least."""


def run(tables: SnapshotTables, params: JobParams) -> JobResult:
    """Audit effects of all topics. Raises InvalidInput without an application's database."""
    if params.effects is None or tables.cut is None:
        raise InvalidInput("the effect audit reads an application's database: set MQLAYER_APP_DSN")
    rows = params.effects(tables.records.sparkSession).persist()
    ended = effects.ended(tables.records, tables.outcomes).persist()
    messages = effects.judged_messages(ended, rows, horizon=HORIZON).persist()
    judged = effects.judged_effects(rows, tables.records, ended, tables.cut).persist()
    by_message = rows_of(effects.counts(messages), "topic", "group", "verdict")
    by_row = rows_of(effects.counts(judged), "topic", "group", "verdict")
    found = rows_of(effects.findings(messages, judged), "topic", "group", "lp", "source", "seq", most=MAX_SHOWN)
    ended.unpersist()
    rows.unpersist()
    groups = _groups(by_message, by_row)
    sums = {fault: sum(one["count"] for one in [*by_message, *by_row] if one["verdict"] == fault)
            for fault in effects.FAULTS}  # fmt: skip
    unfenced = [f"{one['topic']}/{one['group']}" for one in by_message if one["verdict"] == "no rows"]
    good = not any(sums.values())
    facts = {
        "verdict": "clean" if good else "not clean",
        "handled_without_effect": sums[effects.FAULTS[0]],
        "effects_without_handling": sums[effects.FAULTS[1]],
        "groups_without_rows": unfenced,
        "messages": by_message,
        "effects": by_row,
        "findings": found,
    }
    shown = {"handled messages and effect rows": groups, "findings": found}
    section = Section("effects", "Effect audit", _parts(groups, found, sums, unfenced, good=good))
    return JobResult("effects", facts, shown, section, {"messages": messages, "effects": judged}, good)


def _groups(by_message: Sequence[Mapping[str, Any]], by_row: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    told = [("handled message", one) for one in by_message] + [("effect row", one) for one in by_row]
    return [
        {"topic": one["topic"], "group": one["group"], "of": what, "verdict": one["verdict"], "count": one["count"]}
        for what, one in told
    ]


def _parts(
    groups: Sequence[Mapping[str, Any]],
    found: Sequence[Mapping[str, Any]],
    sums: Mapping[str, int],
    unfenced: Sequence[str],
    *,
    good: bool,
) -> list[Part]:
    word = "Clean: no message contradicts its effect." if good else "Not clean: see the findings below."
    decided = sum(one["count"] for one in groups if one["of"] == "handled message" and one["verdict"] == "proved")
    tiles = [Tile("messages proved", f"{decided:,}")]
    tiles += [Tile(name, f"{count:,}", "bad" if count else "good") for name, count in sums.items()]
    bars = [Bar(f"{one['group']}: {one['verdict']} ({one['of']})", one["count"], f"{one['count']:,}") for one in groups]
    parts: list[Part] = [Note(f"{'✓' if good else '✗'} {word}", "good" if good else "bad"), Tiles(tiles)]
    if unfenced:
        parts.append(Note(f"Groups without a row of fence or inbox: {', '.join(unfenced)}."))
    return [
        *parts,
        BarChart("Messages and rows by verdict", bars, nothing="no group handled anything of this snapshot"),
        Table("Messages and rows", groups, "none"),
        Table("Findings", found, "none"),
    ]


if __name__ == "__main__":
    import sys

    from mqlayer.spark.jobs.runner import submit

    sys.exit(submit("effects"))
