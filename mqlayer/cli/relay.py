"""`relay`: move outbox messages to partitions."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from mqlayer.cli.addresses import settings_here
from mqlayer.cli.output import echo, pluralize
from mqlayer.health import health_endpoint
from mqlayer.relay import Relay, relay_once


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.command()(relay)


def relay(
    once: Annotated[
        bool, typer.Option("--once", help="Relay what waits in LPs that no living relay holds, then end.")
    ] = False,
) -> None:
    """Relay the outbox until SIGTERM or SIGINT. Several may run."""
    settings = settings_here()
    if once:
        echo(f"{pluralize(relay_once(settings), 'message')} relayed")
        return
    running = Relay(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        # From a thread: the interrupted main thread may hold a lock that stop() needs.
        signal.signal(number, lambda *_: threading.Thread(target=running.stop).start())
    with health_endpoint(settings, running.health):
        running.run()
