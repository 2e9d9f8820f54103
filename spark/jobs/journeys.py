"""Key journeys; docs/how-to/analyze.md explains them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote, urlencode

from mqlayer.errors import InvalidInput
from mqlayer.spark.html_report import Bar, BarChart, Link, Note, Part, Section, Table
from mqlayer.spark.jobs.job import JobParams, JobResult, SnapshotTables, rows_of
from mqlayer.spark.transforms.journeys import STAGES, by_key, by_stage, journeys

WORST: Final = 100
CHARTS: Final = 12

Row = dict[str, Any]


def run(tables: SnapshotTables, params: JobParams) -> JobResult:
    """Report stages, worst keys and messages. Raises InvalidInput for a bad address."""
    console = _address(params.console)
    found = journeys(tables.records, tables.outcomes).persist()
    frames = {"stages": by_stage(found).persist(), "keys": by_key(found).persist()}
    stages = sorted(rows_of(frames["stages"], "topic", "group"), key=_stage_order)
    keys = rows_of(frames["keys"], "-total_ms", "topic", "group", "key", most=WORST)
    messages = rows_of(found, "-total_ms", "topic", "group", "partition", "offset", most=WORST)
    frames["messages"] = found.orderBy("total_ms", ascending=False).limit(WORST).persist()
    frames["messages"].count()
    found.unpersist()
    stages = [{name: _rounded(value) for name, value in row.items()} for row in stages]
    worst = [_message(row) for row in messages]
    linked = {
        "keys": [row | _link(console, _key_path(row)) for row in keys],
        "messages": [row | _link(console, _message_path(row)) for row in worst],
    }
    section = Section("journeys", "Key journeys", _parts(stages, keys, worst, console))
    shown = {"stages": stages, "worst keys": keys, "worst messages": worst}
    return JobResult("journeys", {"stages": stages, **linked}, shown, section, frames)


def _parts(stages: Sequence[Row], keys: Sequence[Row], messages: Sequence[Row], console: str) -> list[Part]:
    parts: list[Part] = [
        Note(
            "Stream: from publishing to the first delivery, outbox included. Failing: from publishing to a first "
            "parking or death. Attempts: from a delivery to the end. Parking and dead: until the next delivery."
        ),
        Table("Stages", stages, "no group settled anything of this snapshot"),
    ]
    for topic, group in list(dict.fromkeys((row["topic"], row["group"]) for row in stages))[:CHARTS]:
        own = [row for row in stages if (row["topic"], row["group"]) == (topic, group)]
        bars = [
            Bar(row["stage"], row["sum_s"], f"{row['sum_s']:,.1f} s · {row['share']:.0%} · p95 {row['p95_ms']:,.0f} ms")
            for row in own
        ]
        parts.append(BarChart(f"{topic} → {group}: where the time went, all messages together", bars))
    shown_keys = [row | {"key": _linked(row["key"], console, _key_path(row))} for row in keys]
    shown = [row | {"message": _linked(row["message"], console, _message_path(row))} for row in messages]
    parts.append(Table(f"The {WORST} keys whose messages spent most time", shown_keys, "no message has a key"))
    parts.append(Table(f"The {WORST} longest journeys", shown, "no group settled anything of this snapshot"))
    return parts


def _message(row: Row) -> Row:
    names = ("topic", "group", "key", "outcome", "total_ms", *(f"{stage}_ms" for stage in STAGES))
    facts = {name: row[name] for name in (*names, "outbox_most_ms", "attempts", "parkings", "published_at")}
    return {"message": f"{row['source']}:{row['lp']}:{row['seq']}", **facts}


def _address(console: str | None) -> str:
    if console and not console.startswith(("http://", "https://")):
        raise InvalidInput(f"the console's address is {console!r}: begin it with https:// or http://")
    return (console or "").rstrip("/")


def _key_path(row: Row) -> str:
    return "/keys?" + urlencode({"topic": row["topic"], "key": row["key"], "group": row["group"]})


def _message_path(row: Row) -> str:
    return f"/messages/{quote(row['topic'], safe='')}/{quote(row['message'], safe='')}"


def _link(console: str, path: str) -> Row:
    return {"console": console + path} if console else {}


def _linked(text: str, console: str, path: str) -> Link | str:
    return Link(text, console + path) if console else text


def _stage_order(row: Row) -> tuple[str, str, int]:
    return row["topic"], row["group"], STAGES.index(row["stage"])


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    import sys

    from mqlayer.spark.jobs.runner import submit

    sys.exit(submit("journeys"))
