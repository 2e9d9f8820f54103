"""`archive`: run, status, gaps, retention."""

from __future__ import annotations

import signal
import threading
from dataclasses import asdict
from typing import Annotated, Final

import typer

from mqlayer.archive import ArchiveReport, accept_gaps, archive_pass, archive_status, list_gaps, old_days, retain
from mqlayer.cli.actor import actor
from mqlayer.cli.addresses import settings_here
from mqlayer.cli.archive_export import add_exports
from mqlayer.cli.option_rules import RuledCommand, planned
from mqlayer.cli.options import PlanOption, TopicArgument, YesOption, echo_plan, parse_length_option
from mqlayer.cli.output import JsonOption, echo, pluralize, show_rows
from mqlayer.cli.panels import CHANGE, LOOK, REPAIR, START
from mqlayer.cli.permissions import check_change
from mqlayer.cli.runtime import control_here, runtime_here
from mqlayer.errors import MqlayerError
from mqlayer.postgres.rights import Right
from mqlayer.runtime.runtime import open_runtime

archive = typer.Typer(no_args_is_help=True, help="The archive: records kept in Postgres.")

IDLE_S: Final = 1.0

SomeTopic = Annotated[str | None, typer.Argument(help="Only this topic.")]


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    add_exports(archive)
    app.add_typer(archive, name="archive")


@archive.command(rich_help_panel=START)
def run(
    topic: SomeTopic = None,
    once: Annotated[bool, typer.Option("--once", help="One pass, to the end of every stream.")] = False,
) -> None:
    """Archive until SIGTERM; the worker does it every 5 s."""
    settings = settings_here()
    stopping = threading.Event()
    with open_runtime(settings, name="mqlayer archive", actor=actor()) as runtime:
        check_change(runtime.control, Right.WORK)
        if once:
            _print_report(archive_pass(runtime, topic=topic))
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            # From a thread: the interrupted main thread may hold the event's lock.
            signal.signal(number, lambda *_: threading.Thread(target=stopping.set).start())
        while not stopping.is_set():
            try:
                report = archive_pass(runtime, topic=topic, at_most_s=5.0)
                idle = not report.total
            except MqlayerError as error:
                echo(str(error), err=True)
                idle = True
            if idle:
                stopping.wait(IDLE_S)


@archive.command(rich_help_panel=LOOK)
def status(topic: SomeTopic = None, as_json: JsonOption = False) -> None:
    """Show per topic the archive's progress, backlog, and records kept for it alone."""
    with runtime_here() as runtime:
        found = archive_status(runtime, topic=topic)
    for one in found:
        for name, reason in one.unreachable.items():
            echo(f"node {name} was not asked: {reason}", err=True)
    rows = ({name: fact for name, fact in asdict(one).items() if name != "unreachable"} for one in found)
    if not as_json:
        # Its label would be that of the count.
        rows = ({"behind_s" if name == "lag_s" else name: fact for name, fact in row.items()} for row in rows)
    show_rows(rows, as_json=as_json, nothing="no topic is archived: mqlayer topic set NAME --archived")


@archive.command(rich_help_panel=LOOK)
def gaps(
    topic: SomeTopic = None,
    waiting: Annotated[bool, typer.Option("--waiting", help="Only those at which a partition waits.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List seqs that the archive lacks and no stream holds."""
    with control_here() as database:
        found = list_gaps(database, topic, waiting=waiting)
    rows = (asdict(gap) | {"missing": gap.missing} for gap in found)
    show_rows(rows, as_json=as_json, nothing="the archive has no gap")


@archive.command("accept-gap", rich_help_panel=REPAIR)
def accept_gap(
    topic: TopicArgument,
    reason: Annotated[str, typer.Option(help="Why it may be missing; goes into the audit log.")],
    partition: Annotated[int | None, typer.Option(help="Only where this partition waits.")] = None,
) -> None:
    """Let the archiver continue behind gaps; later snapshots start there."""
    with runtime_here() as runtime:
        check_change(runtime.control)
        count = accept_gaps(runtime, topic, reason=reason, partition=partition)
    echo(f"{pluralize(count, 'gap')} accepted; the next pass archives the records after them")


@archive.command("retain", cls=RuledCommand, rich_help_panel=CHANGE)
@planned
def retain_(
    older_than: Annotated[str, typer.Option(metavar="AGE", help="Such as 30d, 12w; a day at least.")],
    _plan: PlanOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Drop archived days past an age; snapshots keep theirs."""
    age = parse_length_option(older_than)
    with runtime_here() as runtime:
        if not yes:
            rows = ({"day": day, "result": "would be dropped"} for day in old_days(runtime, older_than=age))
            show_rows(rows, as_json=as_json, nothing="no day of the archive is that old")
            if not as_json:
                echo_plan("days that a snapshot needs would stay")
            return
        check_change(runtime.control, Right.WORK)
        days = retain(runtime, older_than=age)
    show_rows(map(asdict, days), as_json=as_json, nothing="no day of the archive is that old")


def _print_report(report: ArchiveReport) -> None:
    echo(f"{pluralize(report.total, 'record')} archived, {pluralize(len(report.completed), 'partition')} completed")
    for partition in report.stopped:
        echo(f"partition {partition} waits at a gap: mqlayer archive gaps --waiting", err=True)
    for name, reason in report.skipped_nodes.items():
        echo(f"node {name} was passed by: {reason}", err=True)
    for name in report.locked_topics:
        echo(f"the archive of topic {name} is held by another process", err=True)
    for partition, reason in report.failed.items():
        echo(f"partition {partition} was not archived: {reason}", err=True)
    if report.stopped or report.skipped_nodes or report.locked_topics or report.failed:
        raise typer.Exit(1)
