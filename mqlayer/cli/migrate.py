"""`migrate`: update the schemas."""

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
    """A schema's name."""

    CONTROL = "control"
    APPLICATION = "application"


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.command()(migrate)


def migrate(
    sql: Annotated[
        bool, typer.Option("--sql", help="Print the SQL for a database administrator; run nothing.")
    ] = False,
    schema: Annotated[Schema | None, typer.Option(help="Only this schema; else both, each in its database.")] = None,
    owner: Annotated[
        str | None,
        typer.Option(metavar="ROLE", help="The schemas' owner; default: the present one, or mqlayer_owner."),
    ] = None,
) -> None:
    """Migrate the schemas in MQLAYER_DSN (control) and MQLAYER_APP_DSN (application; default: the same).

    Safe to repeat and to run concurrently; refuses a newer database. The owner has no login, and is created if missing.
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
