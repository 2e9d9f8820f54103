"""`outbox`: rows set aside, and rotation."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from mqlayer.cli.addresses import settings_here
from mqlayer.cli.showing import JsonOption, show_rows
from mqlayer.outbox import list_aside, retry_aside, rotate
from mqlayer.postgres.database import Database

outbox = typer.Typer(no_args_is_help=True, help="The outbox of MQLAYER_APP_DSN: rows set aside, rotation.")
aside = typer.Typer(no_args_is_help=True, help="Rows that can never be sent; each holds its LP.")
outbox.add_typer(aside, name="aside")


def add_to(app: typer.Typer) -> None:
    """Put the commands into the application."""
    app.add_typer(outbox, name="outbox")


@aside.command("list")
def list_(as_json: JsonOption = False) -> None:
    """List the rows set aside, with the reason of each."""
    with _application() as database:
        show_rows((asdict(row) for row in list_aside(database)), as_json=as_json, nothing="nothing is set aside")


@aside.command()
def retry(
    topic: Annotated[str | None, typer.Argument(help="Only this topic.")] = None,
    lp: Annotated[int | None, typer.Argument(min=0, max=1023, help="Only this LP of it.")] = None,
) -> None:
    """Let relays try again; a row that still can't be sent is set aside again."""
    with _application() as database:
        chosen = retry_aside(database, topic=topic, lp=lp)
    for row in chosen:
        typer.echo(f"topic {row.topic or row.topic_id}, LP {row.lp}: tried again from seq {row.seq}")
    if not chosen:
        typer.echo("nothing is set aside")


@outbox.command("rotate")
def rotate_() -> None:
    """Empty the time slots whose rows are all relayed and old enough."""
    with _application() as database:
        for slot, answer in rotate(database).items():
            typer.echo(f"slot {slot}: {answer}")


def _application() -> Database:
    return Database(settings_here().application_dsn())
