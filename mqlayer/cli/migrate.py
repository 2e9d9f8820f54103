"""`migrate`: bring the databases up to this code."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from mqlayer.cli.addresses import settings_of_owner
from mqlayer.cli.output import echo
from mqlayer.postgres import migrations
from mqlayer.postgres.migrations import SchemaName
from mqlayer.settings import Settings


class Schema(StrEnum):
    """A schema as the command line names it."""

    CONTROL = "control"
    APPLICATION = "application"


def add_to(app: typer.Typer) -> None:
    """Put the command into the application."""
    app.command()(migrate)


def migrate(
    sql: Annotated[
        bool, typer.Option("--sql", help="Print the SQL for a database administrator; run nothing.")
    ] = False,
    schema: Annotated[Schema | None, typer.Option(help="Only this schema; else both, each in its database.")] = None,
    owner: Annotated[
        str | None,
        typer.Option(metavar="ROLE", help="The role that owns the schemas; without, theirs of now, or mqlayer_owner."),
    ] = None,
) -> None:
    """Bring the databases up to this code.

    The control schema goes to MQLAYER_DSN, the application's to MQLAYER_APP_DSN, or to the same where that is not set.
    Safe to run twice and at once. A database that is newer than this code is refused and left alone.
    The schemas belong to a role without login that is no superuser: made where it is not there, and given what belongs
    to another one.
    """
    chosen: tuple[SchemaName, ...] = ("control", "application") if schema is None else (schema.value,)
    if sql:
        for name in chosen:
            typer.echo(migrations.script(schema=name, owner=owner), nl=False)
        return
    settings = settings_of_owner()
    done = [step for name in chosen for step in migrations.migrate(_dsn(settings, name), schema=name, owner=owner)]
    for step in done:
        echo(f"{step.schema} {step.number:04d} {step.name}")
    if not done:
        echo("nothing to do")


def _dsn(settings: Settings, schema: SchemaName) -> str:
    return settings.control_dsn() if schema == "control" else settings.application_dsn()
