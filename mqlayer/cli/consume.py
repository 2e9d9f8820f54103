"""`consume`: run a program's consumers."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mqlayer.cli.addresses import use_stack_here
from mqlayer.cli.dead_sessions import DeadSessions
from mqlayer.cli.logs import log_environment
from mqlayer.cli.reload import changed_files
from mqlayer.cli.supervisor import Supervisor
from mqlayer.cli.supervisor_pipe import SupervisorPipe
from mqlayer.consuming.api.app import App
from mqlayer.consuming.api.app_loader import load_app
from mqlayer.domain.names import check_deployment
from mqlayer.errors import InvalidInput
from mqlayer.health import health_endpoint

SLACK_S = 30.0
"""Beyond the drain limit, before processes are killed."""
RELOAD_LIMIT_S = 300.0
"""The same for --reload, which does not know the program's drain limit."""


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.command()(consume)


def consume(
    context: typer.Context,
    application: Annotated[str, typer.Argument(metavar="MODULE:APP", help="Where the program's mqlayer.App is.")],
    processes: Annotated[int, typer.Option("--processes", "-p", min=1, max=256, help="How many processes.")] = 1,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Handlers at once per consumer and process; else what the program says.")
    ] = None,
    deployment: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The version of the program; `group deploy` says which one consumes."),
    ] = None,
    zone: Annotated[str, typer.Option(help="Prefer partitions on nodes of this zone; else MQLAYER_ZONE.")] = "",
    reload: Annotated[
        bool, typer.Option("--reload", help="For development: restart when a Python file below this folder changes.")
    ] = False,
) -> None:
    """Run the consumers of MODULE:APP until SIGTERM or SIGINT.

    Running handlers finish; a second signal kills. Dead processes restart. This process uses MQLAYER_HEALTH_PORT,
    several processes the next ports.
    """
    use_stack_here()
    if deployment is not None:
        # Before the program is loaded, and for the other processes.
        os.environ["MQLAYER_DEPLOYMENT"] = check_deployment(deployment)
    if zone:
        # For the application's settings, and for child processes.
        os.environ["MQLAYER_ZONE"] = zone
    if reload:
        with changed_files(Path.cwd()) as changed:
            command = _command(application, concurrency)
            environment = {**os.environ, **log_environment(context)}
            supervisor = Supervisor(
                command, count=processes, environment=environment, stop_limit_s=RELOAD_LIMIT_S, changed=changed
            )
            ended_in_order = supervisor.run()
        if not ended_in_order:
            raise typer.Exit(1)
        return
    app = load_app(application)
    if concurrency is not None:
        app.consumers[:] = [replace(c, options=replace(c.options, concurrency=concurrency)) for c in app.consumers]
    ended_in_order = _run_here(app) if processes == 1 else _supervise(context, app, application, processes, concurrency)
    if not ended_in_order:
        raise typer.Exit(1)


def _run_here(app: App) -> bool:
    # Freeze loaded objects: full collections would scan them every few thousand messages.
    gc.collect()
    gc.freeze()
    pipe = SupervisorPipe.from_environment()
    if pipe is None:
        return app.run()
    pipe.watch()
    app.process_number, app.joining = pipe.number, pipe.report_joining
    port = app.settings.health_port
    return app.run(on_start=pipe.report_started, health_port=port + pipe.number if port else 0)


def _supervise(context: typer.Context, app: App, path: str, processes: int, concurrency: int | None) -> bool:
    named = [consumer.options.member_id for consumer in app.consumers if consumer.options.member_id]
    if named:
        raise InvalidInput(f"member id {named[0]!r} is for one process: leave it out, or run one process")
    instances = [consumer.instance for consumer in app.consumers if consumer.instance]
    if instances:
        raise InvalidInput(f"instance {instances[0]!r} is one process: leave it out, or run one process")
    limit_s = max((consumer.options.drain_timeout_s for consumer in app.consumers), default=0.0) + SLACK_S
    command = _command(path, concurrency)
    with DeadSessions(app.settings) as dead:
        environment = {**os.environ, **log_environment(context)}
        supervisor = Supervisor(command, count=processes, environment=environment, stop_limit_s=limit_s, ended=dead.end)
        with health_endpoint(app.settings, supervisor.health):
            return supervisor.run()


def _command(path: str, concurrency: int | None) -> list[str]:
    limit = [] if concurrency is None else ["--concurrency", str(concurrency)]
    return [sys.executable, "-m", "mqlayer", "consume", path, *limit]
