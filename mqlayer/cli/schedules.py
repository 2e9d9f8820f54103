"""`analytics schedule`: snapshots and jobs at fixed times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mqlayer.archive.scheduled_runs import run_schedule
from mqlayer.archive.schedules import (
    SCHEDULED_JOBS,
    Schedule,
    ScheduledRun,
    create_schedule,
    drop_schedule,
    find_schedule,
    pause_schedule,
    resume_schedule,
    schedule_runs,
    schedules,
)
from mqlayer.cli.option_rules import RuledCommand, needs, planned
from mqlayer.cli.options import PlanOption, YesOption, echo_plan, parse_length_option, parse_time_option
from mqlayer.cli.output import JsonOption, echo, show_rows
from mqlayer.cli.panels import CHANGE, LOOK
from mqlayer.cli.permissions import check_change
from mqlayer.cli.runtime import control_here, runtime_here
from mqlayer.errors import Conflict
from mqlayer.postgres.rights import Right

schedule = typer.Typer(no_args_is_help=True, help="Snapshots and jobs at fixed times, run by the worker.")

NameArgument = Annotated[str, typer.Argument(help="The schedule's name.")]


@schedule.command(cls=RuledCommand, rich_help_panel=CHANGE)
@needs("--export-to", "--job", why="the job export goes there")
def create(
    name: Annotated[str, typer.Argument(help="a-z first, then a-z 0-9 _ . -, at most 40.")],
    every: Annotated[str, typer.Option(metavar="LENGTH", help="Such as 6h, 1d, 1w; ten minutes at least.")],
    job: Annotated[
        list[str] | None, typer.Option(help=f"Run on each snapshot; may be repeated: {', '.join(SCHEDULED_JOBS)}.")
    ] = None,
    topic: Annotated[list[str] | None, typer.Option(help="Only this topic; may be given more than once.")] = None,
    keep: Annotated[int, typer.Option(min=1, help="Newest snapshots that stay.")] = 3,
    first: Annotated[
        str | None, typer.Option(metavar="TIME", help="The first run, with its zone; else at once.")
    ] = None,
    export_to: Annotated[
        str | None, typer.Option(metavar="PATH", help="Where the job export appends, as archive export --to.")
    ] = None,
) -> None:
    """Have the worker make a snapshot at fixed times, and run jobs on it."""
    every_s = int(parse_length_option(every).total_seconds())
    first_at = parse_time_option(first)
    with runtime_here() as runtime:
        check_change(runtime.control)
        made = create_schedule(
            runtime, name, every_s=every_s, jobs=job or (), topics=topic, keep=keep, first_at=first_at,
            export_to=export_to,
        )  # fmt: skip
    echo(f"{name} runs first at {made.next_at:%Y-%m-%d %H:%M} UTC, then every {every}")


@schedule.command("list", rich_help_panel=LOOK)
def list_(as_json: JsonOption = False) -> None:
    """List schedules with their last runs."""
    with control_here() as database:
        found = schedules(database)
    show_rows(
        map(_schedule_row, found), as_json=as_json, nothing="no schedules: mqlayer analytics schedule create NAME"
    )


@schedule.command(rich_help_panel=LOOK)
def runs(
    name: NameArgument,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Most runs that are shown.")] = 50,
    after: Annotated[int | None, typer.Option(help="Start after this run, the last of the page before.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List a schedule's runs, newest first, with what each job found."""
    with control_here() as database:
        found = schedule_runs(database, name, limit=limit, after=after)
    show_rows((_run_row(one, as_json=as_json) for one in found), as_json=as_json, nothing=f"{name} never ran")


@schedule.command(rich_help_panel=CHANGE)
def run(
    name: NameArgument,
    if_due: Annotated[bool, typer.Option("--if-due", help="Only if its time has come; the worker says this.")] = False,
) -> None:
    """Run a schedule now; exit code 1 unless all is good."""
    with runtime_here() as runtime:
        check_change(runtime.control, Right.WORK)
        where = runtime.settings.analytics_dir
        done = run_schedule(runtime, name, if_due=if_due, directory=Path(where) if where else None)
    if done is None:
        if if_due:
            echo(f"{name} is not due, or another run goes on")
            return
        raise Conflict("another run goes on", "one runs at a time: mqlayer analytics schedule list shows which")
    for job, result in done.results.items():
        echo(f"{job}: {result['state']} after {result['seconds']:g} s")
    echo(f"{name}: {done.state}{f', {done.error}' if done.error else ''}; snapshot {done.snapshot or 'none'}")
    if done.state != "good":
        raise typer.Exit(1)


@schedule.command(rich_help_panel=CHANGE)
def pause(name: NameArgument) -> None:
    """Begin no more runs."""
    with runtime_here() as runtime:
        check_change(runtime.control)
        pause_schedule(runtime, name)
    echo(f"{name} is paused; a run that goes on ends")


@schedule.command(rich_help_panel=CHANGE)
def resume(name: NameArgument) -> None:
    """Begin runs again; one that was due meanwhile is due now."""
    with runtime_here() as runtime:
        check_change(runtime.control)
        resume_schedule(runtime, name)
    echo(f"{name} is resumed")


@schedule.command(cls=RuledCommand, rich_help_panel=CHANGE)
@planned
def drop(name: NameArgument, _plan: PlanOption = False, yes: YesOption = False) -> None:
    """Drop a schedule and the record of its runs; snapshots stay."""
    with runtime_here() as runtime:
        if not yes:
            find_schedule(runtime.control, name)
            echo_plan(f"schedule {name} and the record of its runs would be dropped")
            return
        check_change(runtime.control)
        drop_schedule(runtime, name)
    echo(f"{name} is dropped; its snapshots stay: mqlayer snapshot list")


def _schedule_row(one: Schedule) -> Mapping[str, Any]:
    return {
        "schedule": one.name,
        "topics": "all" if one.topics is None else ", ".join(one.topics),
        "jobs": ", ".join(one.jobs),
        "export_to": one.export_to,
        "every_s": one.every_s,
        "keep": one.keep,
        "next_at": None if one.paused_at else one.next_at,
        "paused_at": one.paused_at,
        "last": one.last.state if one.last else None,
        "last_at": one.last.ended_at if one.last else None,
        "running": one.running.job or "snapshot" if one.running else None,
    }


def _run_row(one: ScheduledRun, *, as_json: bool) -> Mapping[str, Any]:
    told = [f"{job} {result['state']}" for job, result in one.results.items()]
    return {
        "run": one.run_id,
        "state": one.state,
        "snapshot": one.snapshot,
        "started_at": one.started_at,
        "ended_at": one.ended_at,
        "results": one.results if as_json else ", ".join(told),
        "error": one.error or next((found["error"] for found in one.results.values() if "error" in found), None),
        "worker": one.worker,
    }
