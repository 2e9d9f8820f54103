"""`snapshot`: fixed cuts of the archive."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mqlayer.archive import create_snapshot, drop_snapshot, find_snapshot, list_snapshots, verify_snapshot
from mqlayer.archive.parquet_export import export_snapshot
from mqlayer.cli.option_rules import RuledCommand, planned
from mqlayer.cli.options import PlanOption, YesOption, echo_plan, parse_time_option
from mqlayer.cli.output import JsonOption, echo, format_size, pluralize, show_rows
from mqlayer.cli.panels import CHANGE, LOOK
from mqlayer.cli.permissions import check_change
from mqlayer.cli.runtime import control_here, runtime_here

snapshots = typer.Typer(no_args_is_help=True, help="Snapshots of the archive: create, list, show, export, drop.")

NameArgument = Annotated[str, typer.Argument(help="The snapshot's name.")]


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.add_typer(snapshots, name="snapshot")


@snapshots.command(rich_help_panel=CHANGE)
def create(
    name: Annotated[str, typer.Argument(help="a-z first, then a-z 0-9 _ . -")],
    topic: Annotated[list[str] | None, typer.Option(help="Only this topic; may be given more than once.")] = None,
    at: Annotated[str | None, typer.Option(help="Leave out what was published later, by publishers' clocks.")] = None,
) -> None:
    """Create an unchangeable snapshot of the archive; retention spares it."""
    with runtime_here() as runtime:
        check_change(runtime.control)
        made = create_snapshot(runtime, name, topics=topic or None, at=parse_time_option(at))
    echo(f"{name} has {pluralize(made.records, 'record')} of {pluralize(len(made.topics), 'topic')}")


@snapshots.command("list", rich_help_panel=LOOK)
def list_(as_json: JsonOption = False) -> None:
    """List snapshots, oldest first."""
    with control_here() as database:
        found = list_snapshots(database)
    rows = (
        {
            "snapshot": one.name,
            "created_at": one.created_at,
            "upto_at": one.upto_at,
            "topics": ", ".join(topic.topic for topic in one.topics),
            "records": one.records,
        }
        for one in found
    )
    show_rows(rows, as_json=as_json, nothing="no snapshots: mqlayer snapshot create NAME")


@snapshots.command(rich_help_panel=LOOK)
def show(
    name: NameArgument,
    verify: Annotated[bool, typer.Option("--verify", help="Count all of its records: no gap, no duplicate.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show records per topic; --verify counts gaps and duplicates."""
    with control_here() as database:
        found = find_snapshot(database, name)
        broken = verify_snapshot(database, name) if verify else []
    rows = (
        {
            "topic": one.topic,
            "batch": one.batch,
            "version": one.version,
            "records": one.records,
            "ranges": one.ranges,
        }
        for one in found.topics
    )
    show_rows(rows, as_json=as_json, nothing=f"{name} holds no topic")
    for one in broken:
        echo(
            f"{one.topic}, source {one.source}, LP {one.lp}: "
            f"{pluralize(one.rows, 'record')} of {pluralize(one.seqs, 'seq')} where there must be {one.wanted}",
            err=True,
        )
    if broken:
        raise typer.Exit(1)
    if verify and not as_json:
        echo(f"verified: {pluralize(found.records, 'record')}, no gap, no duplicate")


@snapshots.command(rich_help_panel=LOOK)
def export(
    name: NameArgument,
    to: Annotated[Path, typer.Option(help="A directory that is not there yet.")],
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Files that are written side by side.")] = 2,
) -> None:
    """Write a snapshot as Parquet files, all or nothing."""
    with runtime_here() as runtime:
        check_change(runtime.control)
        done = export_snapshot(runtime, name, to, jobs=jobs)
    files = sum(map(len, done.files.values()))
    echo(
        f"{pluralize(done.snapshot.records, 'record')} in {pluralize(files, 'file')} of {format_size(done.bytes)}: {to}"
    )


@snapshots.command(cls=RuledCommand, rich_help_panel=CHANGE)
@planned
def drop(name: NameArgument, _plan: PlanOption = False, yes: YesOption = False) -> None:
    """Drop a snapshot: readers fail, retention may drop its records."""
    with runtime_here() as runtime:
        if not yes:
            found = find_snapshot(runtime.control, name)
            echo_plan(f"snapshot {name} of {pluralize(found.records, 'record')} would be dropped")
            return
        check_change(runtime.control)
        drop_snapshot(runtime, name)
    echo(f"{name} is dropped; the archive keeps its records until retention drops them")
