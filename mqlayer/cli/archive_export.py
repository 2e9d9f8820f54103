"""`archive`: exports to a lake."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from mqlayer.cli.option_rules import RuledCommand, planned
from mqlayer.cli.options import PlanOption, YesOption, echo_plan
from mqlayer.cli.output import JsonOption, echo, pluralize, show_rows
from mqlayer.cli.panels import CHANGE, LOOK, REPAIR
from mqlayer.cli.permissions import check_change
from mqlayer.cli.runtime import control_here, runtime_here
from mqlayer.errors import ArchiveBroken
from mqlayer.postgres.rights import Right

LocationArgument = Annotated[str, typer.Argument(help="A directory, or an address such as s3://bucket/folder.")]


def add_exports(app: typer.Typer) -> None:
    """Add commands."""
    app.command(rich_help_panel=CHANGE)(export)
    app.command(rich_help_panel=LOOK)(exports)
    app.command("verify-export", rich_help_panel=LOOK)(verify_export_)
    app.command("forget-export", cls=RuledCommand, rich_help_panel=REPAIR)(planned(forget_export))


def export(
    to: Annotated[str, typer.Option(metavar="PATH", help="A directory, or an address such as s3://bucket/folder.")],
    topic: Annotated[list[str] | None, typer.Option(help="Only this topic; may be given more than once.")] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Leave the new rows unverified; retention may wait for that.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Append what the archive has and the export lacks, as Delta tables; safe to kill and repeat."""
    from mqlayer.archive.lake import export_archive, verify_export

    told: dict[str, Any] = {"job": "export"}
    with runtime_here() as runtime:
        check_change(runtime.control, Right.WORK)
        try:
            report = export_archive(runtime, to, topics=topic or None)
            if not no_verify:
                verify_export(runtime, to)
        except ArchiveBroken as error:
            if as_json:
                show_rows([told | {"good": False, "error": str(error)}], as_json=True, nothing="")
            raise
    if as_json:
        told |= {"good": True, "records": report.total, "verified": not no_verify, **asdict(report)}
        show_rows([told], as_json=True, nothing="")
        return
    done = f"{pluralize(report.total, 'record')} exported in {pluralize(report.commits, 'commit')}"
    verified = "not verified" if no_verify else "verified"
    echo(f"{done}, {pluralize(report.compacted, 'small file')} compacted, {verified}: {to}")


def exports(as_json: JsonOption = False) -> None:
    """List exports: what each has of each topic, and how far it is behind."""
    from mqlayer.archive.lake.state import lake_statuses

    with control_here() as database:
        found = lake_statuses(database)
    show_rows(map(asdict, found), as_json=as_json, nothing="nothing is exported: mqlayer archive export --to PATH")


def verify_export_(location: LocationArgument, as_json: JsonOption = False) -> None:
    """Compare an export with the archive, and hash its verified files again; exit code 1 for a difference."""
    from mqlayer.archive.lake import verify_export

    with runtime_here() as runtime:
        check_change(runtime.control, Right.WORK)
        found = verify_export(runtime, location, whole=True)
    if as_json:
        show_rows([asdict(found)], as_json=True, nothing="")
        return
    echo(f"verified: {pluralize(sum(found.records.values()), 'new record')}, no difference")


def forget_export(location: LocationArgument, _plan: PlanOption = False, yes: YesOption = False) -> None:
    """Forget an export; its files stay, and nothing is added to them any more."""
    from mqlayer.archive.lake.state import find_lake, forget_lake

    with runtime_here() as runtime:
        if not yes:
            known = find_lake(runtime.control, location)
            echo_plan(f"the export at {known.location} would be forgotten; its files stay")
            return
        check_change(runtime.control, Right.WORK)
        forget_lake(runtime, location)
    echo(f"forgotten: {location}")
