"""`trim`: drop what every group has settled."""

from __future__ import annotations

from typing import Annotated

import typer

from mqlayer.cli.addresses import settings_here
from mqlayer.cli.permission import check_change
from mqlayer.cli.showing import say
from mqlayer.postgres.database import Database
from mqlayer.postgres.rights import Right
from mqlayer.trimming import trim_pass


def add_to(app: typer.Typer) -> None:
    """Put the command into the application."""
    app.command()(trim)


def trim(topic: Annotated[str | None, typer.Argument(help="Only this topic.")] = None) -> None:
    """Drop records that every group has settled. The worker does it by itself; this is one pass by hand."""
    settings = settings_here()
    with Database(settings.control_dsn()) as database:
        check_change(database, Right.WORK)
        report = trim_pass(database, prefix=settings.key_prefix, topic=topic, unsafe=settings.allow_unsafe_redis)
    say(f"{report.total} records dropped from {len(report.dropped)} partitions")
    for name, reason in report.passed_by.items():
        say(f"node {name} was passed by: {reason}", err=True)
    if report.passed_by:
        raise typer.Exit(1)
