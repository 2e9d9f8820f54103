"""The `mqlayer` command. Each module adds its commands by `add_to(app)`."""

from __future__ import annotations

from typing import Annotated

import typer

import mqlayer
from mqlayer.cli import (
    analytics,
    archive,
    consume,
    dead,
    doctor,
    groups,
    idempotency,
    keys,
    migrate,
    nodes,
    outbox,
    parked,
    relay,
    replay,
    rights,
    routes,
    snapshot,
    stack,
    topics,
    trim,
)
from mqlayer.cli.errors import ErrorPrintingGroup
from mqlayer.cli.logs import configure_command_logging
from mqlayer.cli.output import echo

app = typer.Typer(
    name="mqlayer",
    cls=ErrorPrintingGroup,
    help="Strictly ordered, elastic messaging on Redis Streams and Postgres.",
    no_args_is_help=True,
    add_completion=False,
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
    log_level: Annotated[str, typer.Option(envvar="MQLAYER_LOG_LEVEL", help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    log_json: Annotated[
        bool, typer.Option("--log-json", envvar="MQLAYER_LOG_JSON", help="Log one JSON object per line.")
    ] = False,
) -> None:
    """Configure logging."""
    configure_command_logging(log_level, as_json=log_json)


stack.add_to(app)
consume.add_to(app)
migrate.add_to(app)
rights.add_to(app)
nodes.add_to(app)
topics.add_to(app)
routes.add_to(app)
groups.add_to(app)
keys.add_to(app)
parked.add_to(app)
dead.add_to(app)
replay.add_to(app)
relay.add_to(app)
outbox.add_to(app)
idempotency.add_to(app)
trim.add_to(app)
archive.add_to(app)
snapshot.add_to(app)
analytics.add_to(app)
doctor.add_to(app)
