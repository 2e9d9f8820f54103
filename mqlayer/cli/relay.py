"""`relay`: move outbox messages to partitions."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from mqlayer.cli.addresses import settings_here
from mqlayer.cli.logs import log_environment
from mqlayer.cli.option_rules import RuledCommand, excludes
from mqlayer.cli.output import echo, pluralize
from mqlayer.cli.supervisor_pipe import SupervisorPipe
from mqlayer.health import health_endpoint
from mqlayer.relay import Relay, relay_once


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.command(cls=RuledCommand)(relay)


@excludes("--once", "--processes", why="one process drains what waits")
def relay(
    context: typer.Context,
    once: Annotated[
        bool, typer.Option("--once", help="Relay what waits in LPs that no living relay holds, then end.")
    ] = False,
    processes: Annotated[int, typer.Option("--processes", "-p", min=1, max=16, help="How many processes.")] = 1,
) -> None:
    """Relay the outbox until SIGTERM or SIGINT. Several may run.

    Of several processes, the others take a dead one's part at once, and it restarts. This process uses
    MQLAYER_HEALTH_PORT, several processes the next ports.
    """
    settings = settings_here()
    if once:
        echo(f"{pluralize(relay_once(settings), 'message')} relayed")
        return
    if processes > 1:
        from mqlayer.cli.relay_processes import supervise_relays

        if not supervise_relays(settings, processes, log_environment(context)):
            raise typer.Exit(1)
        return
    running = Relay(settings)
    pipe, port = SupervisorPipe.from_environment(), settings.health_port
    if pipe is not None:
        pipe.watch(running.wake)
        pipe.report_relaying(running.relay_id)
        settings = settings.model_copy(update={"health_port": port + pipe.number if port else 0})
    for number in (signal.SIGTERM, signal.SIGINT):
        # From a thread: the interrupted main thread may hold a lock that stop() needs.
        signal.signal(number, lambda *_: threading.Thread(target=running.stop).start())
    with health_endpoint(settings, running.health):
        if pipe is not None:
            pipe.report_started()
        running.run()
