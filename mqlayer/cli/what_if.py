"""`analytics what-if`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mqlayer.cli.analytics import (
    ConfOption,
    ExportOption,
    HtmlOption,
    JobRequest,
    MethodOption,
    OutOption,
    SnapshotOption,
    run_jobs,
)
from mqlayer.cli.option_rules import RuledCommand, excludes, needs
from mqlayer.cli.options import parse_time_option
from mqlayer.cli.output import JsonOption
from mqlayer.cli.panels import LOOK

ONE_MORE = "may be repeated"


def add_what_if(analytics: typer.Typer) -> None:
    """Add the command."""
    analytics.command("what-if", cls=RuledCommand, rich_help_panel=LOOK)(what_if)


@excludes("--member-rate", "--handler-ms", why="both say how fast a member is")
@needs("--capacity", "--auto", why="it is a threshold of automatic routes")
@needs("--cool-down", "--auto", why="it is a threshold of automatic routes")
@needs("--changes-per-hour", "--auto", why="it is a threshold of automatic routes")
@needs("--max-partitions", "--auto", why="it is a threshold of automatic routes")
@needs("--min-partitions", "--auto", why="it is a threshold of automatic routes")
def what_if(
    snapshot: SnapshotOption,
    topic: Annotated[str | None, typer.Option(help="The topic, where the snapshot holds several.")] = None,
    partitions: Annotated[
        list[int] | None, typer.Option(min=1, max=1024, help=f"Try so many even partitions; {ONE_MORE}.")
    ] = None,
    split_report: Annotated[
        str | None, typer.Option(metavar="FILE", help="Try the splits of a report of skew.")
    ] = None,
    version: Annotated[int | None, typer.Option(min=1, help="Begin with this route version, not the present.")] = None,
    group: Annotated[str | None, typer.Option(help="Whose members and speed, where there are several groups.")] = None,
    members: Annotated[
        list[int] | None, typer.Option(min=1, max=1024, help=f"Try so many members, not as many as were; {ONE_MORE}.")
    ] = None,
    member_rate: Annotated[
        float | None, typer.Option(min=0.001, help="Messages per second of a member; else as the group shows.")
    ] = None,
    handler_ms: Annotated[float | None, typer.Option(min=0.001, help="Milliseconds that a handler takes.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Handlers at once in a member: a key gets one.")] = 8,
    balance: Annotated[str, typer.Option(help="How the group is balanced: count or rate.")] = "count",
    slot: Annotated[float | None, typer.Option(min=0.1, help="Seconds of a step; else as short as possible.")] = None,
    since: Annotated[str | None, typer.Option(help="Published then or later: a time with its zone.")] = None,
    until: Annotated[str | None, typer.Option(help="Published before: a time with its zone.")] = None,
    auto: Annotated[bool, typer.Option("--auto", help="Try automatic routes too, by their own rules.")] = False,
    capacity: Annotated[
        list[float] | None, typer.Option(min=1, help=f"Messages per second of a partition; {ONE_MORE}.")
    ] = None,
    cool_down: Annotated[
        list[float] | None, typer.Option(min=1, max=3600, help=f"Seconds between two changes; {ONE_MORE}.")
    ] = None,
    changes_per_hour: Annotated[
        list[int] | None, typer.Option(min=1, max=720, help=f"No more changes than these; {ONE_MORE}.")
    ] = None,
    max_partitions: Annotated[
        list[int] | None, typer.Option(min=1, max=1024, help=f"Split to no more; {ONE_MORE}.")
    ] = None,
    min_partitions: Annotated[int, typer.Option(min=1, max=1024, help="Merge to no fewer.")] = 1,
    out: OutOption = None,
    html: HtmlOption = None,
    method: MethodOption = None,
    export: ExportOption = None,
    conf: ConfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate the snapshot's arrivals on other routes, with other members, and with automatic routes."""
    from pathlib import Path

    from mqlayer.autopilot.what_if import AutoThresholds, WhatIfParams
    from mqlayer.errors import InvalidInput

    if balance not in ("count", "rate"):
        raise InvalidInput(f"a group is balanced by count or by rate, not {balance!r}")
    thresholds: Any = None
    if auto:
        thresholds = AutoThresholds(
            capacity or (), cool_down or (), changes_per_hour or (), max_partitions or (), min_partitions
        )
    asked = WhatIfParams(
        partitions=partitions or (),
        split_report=None if split_report is None else Path(split_report),
        version=version,
        group=group,
        members=members or (),
        member_per_s=member_rate,
        handling_ms=handler_ms,
        concurrency=concurrency,
        by_rate=balance == "rate",
        slot_s=slot,
        since=parse_time_option(since),
        until=parse_time_option(until),
        thresholds=thresholds,
    )
    topics = None if topic is None else [topic]
    run_jobs("what-if", JobRequest(snapshot, topics, out, html, method, export, conf, as_json), what_if=asked)
