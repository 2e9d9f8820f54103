"""The `mqlayer` command; see `mqlayer.cli.commands` for its commands."""

from __future__ import annotations

import os
from typing import Annotated

import typer

import mqlayer
from mqlayer.cli.commands import LazyGroup
from mqlayer.cli.logs import configure_command_logging
from mqlayer.cli.output import echo

app = typer.Typer(
    name="mqlayer",
    cls=LazyGroup,
    help="Strictly ordered, elastic messaging on Redis Streams and Postgres.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


def show_version(wanted: bool) -> None:
    """Show the version and exit."""
    if wanted:
        echo(mqlayer.__version__)
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and end.", is_eager=True, callback=show_version)
    ] = False,
    dsn: Annotated[
        str,
        typer.Option(
            metavar="DSN", help="Postgres with the control schema, in place of MQLAYER_DSN.", show_default=False
        ),
    ] = "",
    log_level: Annotated[str, typer.Option(envvar="MQLAYER_LOG_LEVEL", help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    log_json: Annotated[
        bool, typer.Option("--log-json", envvar="MQLAYER_LOG_JSON", help="Log one JSON object per line.")
    ] = False,
) -> None:
    """Configure logging."""
    if dsn:
        # Also for the processes that the command starts.
        os.environ["MQLAYER_DSN"] = dsn
    configure_command_logging(log_level, as_json=log_json)
