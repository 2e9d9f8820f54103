"""`exporter`: metrics of the system."""

from __future__ import annotations

import signal
import threading
from typing import Annotated, Final

import typer

from mqlayer.cli.addresses import settings_here
from mqlayer.cli.option_rules import RuledCommand, excludes
from mqlayer.cli.output import echo
from mqlayer.exporter import SystemExporter
from mqlayer.health import health_endpoint, stuck_after_s
from mqlayer.metrics import process_meters, separate_meters
from mqlayer.postgres.rights import Right, require
from mqlayer.runtime.runtime import Runtime, open_runtime
from mqlayer.settings import Settings

PORT: Final = 9464
"""OpenTelemetry's for Prometheus."""
STOP_S: Final = 10.0
SIGNAL_INTERVAL_S: Final = 0.5
PATIENCE: Final = 4
"""Intervals without a pass that mean a stuck thread."""


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.command(cls=RuledCommand)(exporter)


@excludes("--once", "--port", why="a sample that is printed needs no port")
@excludes("--once", "--every", why="it takes one sample")
def exporter(
    port: Annotated[
        int | None, typer.Option(min=1, max=65_535, help="Else MQLAYER_HEALTH_PORT, or 9464 where that is 0.")
    ] = None,
    every: Annotated[float | None, typer.Option(min=1.0, help="Seconds between samples; else 15.")] = None,
    partitions: Annotated[
        bool, typer.Option("--partitions", help="The lag of each partition too: two series each and group.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Print one sample, then end.")] = False,
) -> None:
    """Answer /metrics with the metrics of the system, until SIGTERM or SIGINT: lag, outbox, parked, nodes, jobs.

    Reads only: its role needs the right to view.
    """
    settings = settings_here().model_copy(update={"metrics": True})
    with open_runtime(settings, name="mqlayer exporter", actor="exporter") as runtime:
        _check_rights(runtime)
        if once:
            meters, page = separate_meters()
            SystemExporter(runtime, meters, by_partition=partitions).sample()
            echo(page().decode().rstrip(), lines=True)
        else:
            service = SystemExporter(runtime, process_meters(), every_s=every or 15.0, by_partition=partitions)
            _serve(settings, service, port or settings.health_port or PORT)


def _serve(settings: Settings, service: SystemExporter, port: int) -> None:
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # From a thread: the interrupted main thread may hold the event's lock.
        signal.signal(number, lambda *_: threading.Thread(target=stopping.set).start())
    limit_s = max(stuck_after_s(settings), PATIENCE * service.every_s)
    with health_endpoint(settings, lambda: service.health(limit_s), port=port):
        service.start()
        # Not in one wait without end: a signal that comes as that begins would never be handled.
        while not stopping.wait(SIGNAL_INTERVAL_S):
            pass
        service.stop(STOP_S)


def _check_rights(runtime: Runtime) -> None:
    with runtime.control.connection() as connection:
        require(connection, "control", Right.VIEW, "", Right.OPERATE)
    with runtime.outbox.connection() as connection:
        require(connection, "application", Right.VIEW, "", Right.OPERATE)
