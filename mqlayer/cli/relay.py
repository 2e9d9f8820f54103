"""`relay`: move an outbox's messages to the partitions."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from mqlayer.cli.addresses import settings_here
from mqlayer.cli.output import echo
from mqlayer.health import health_endpoint
from mqlayer.relay import Relay, relay_once


def add_to(app: typer.Typer) -> None:
    """Put the command into the application."""
    app.command()(relay)


def relay(
    once: Annotated[
        bool, typer.Option("--once", help="Relay what waits in LPs that no living relay holds, then end.")
    ] = False,
) -> None:
    """Move the outbox's messages to the partitions until SIGTERM or SIGINT. Any number may run side by side."""
    settings = settings_here()
    if once:
        echo(f"{relay_once(settings)} messages relayed")
        return
    running = Relay(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        # From a thread: the signal may have come while this one holds a lock that stopping needs.
        signal.signal(number, lambda *_: threading.Thread(target=running.stop).start())
    with health_endpoint(settings, running.health):
        running.run()
