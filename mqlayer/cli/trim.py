"""`trim`: drop settled records."""

from __future__ import annotations

from typing import Annotated

import typer

from mqlayer.cli.output import echo
from mqlayer.cli.permissions import check_change
from mqlayer.cli.runtime import runtime_here
from mqlayer.maintenance import trim_pass
from mqlayer.postgres.rights import Right


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.command()(trim)


def trim(topic: Annotated[str | None, typer.Argument(help="Only this topic.")] = None) -> None:
    """Drop settled records in one pass; the worker does so regularly."""
    with runtime_here() as runtime:
        check_change(runtime.control, Right.WORK)
        report = trim_pass(runtime, topic=topic)
    echo(f"{report.total} records dropped from {len(report.dropped)} partitions")
    for name, reason in report.skipped_nodes.items():
        echo(f"node {name} was passed by: {reason}", err=True)
    if report.skipped_nodes:
        raise typer.Exit(1)
