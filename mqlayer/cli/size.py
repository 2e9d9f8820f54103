"""`size`: servers and processes for a planned load."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mqlayer.cli.output import JsonOption, format_size, show_rows
from mqlayer.domain.names import BODY_LIMIT
from mqlayer.domain.sizing import Figures, PlannedLoad, Requirement, requirements

MILLION = 1_000_000


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(size)


def size(
    rate: Annotated[float, typer.Option(min=0.001, max=10 * MILLION, help="Messages per second, over all topics.")],
    body: Annotated[int, typer.Option(min=0, max=BODY_LIMIT, help="Bytes of a body.")] = 256,
    stop_hours: Annotated[float, typer.Option(min=0, max=8_760, help="Longest stop of a group.")] = 4.0,
    handler_ms: Annotated[float, typer.Option(min=0, max=86_400_000, help="Time that a handler takes.")] = 10.0,
    concurrency: Annotated[int, typer.Option(min=1, max=10_000, help="Handlers at once of a consumer.")] = 8,
    groups: Annotated[int, typer.Option(min=1, max=1_000, help="Groups that get each message.")] = 1,
    process_consumers: Annotated[int, typer.Option(min=1, max=1_000, help="Consumers in one process.")] = 1,
    process_rate: Annotated[
        float, typer.Option(min=0.001, max=10 * MILLION, help="Messages per second of a process, at most.")
    ] = Figures.process,
    node_rate: Annotated[
        float, typer.Option(min=0.001, max=10 * MILLION, help="Messages per second that a node appends.")
    ] = Figures.node_appends,
    node_gb: Annotated[float, typer.Option(min=0.1, max=100_000, help="Memory of a node.")] = 8.0,
    relays: Annotated[int, typer.Option(min=0, max=1_000, help="Relays; 0 where nothing uses the outbox.")] = 2,
    workers: Annotated[int, typer.Option(min=0, max=1_000, help="Processes of workers.")] = 2,
    producers: Annotated[int, typer.Option(min=0, max=100_000, help="Processes that publish directly.")] = 0,
    keys_per_week: Annotated[int, typer.Option(min=0, max=10**12, help="Distinct keys in 7 days; 0: no fence.")] = 0,
    inbox: Annotated[bool, typer.Option("--inbox", help="All groups use the inbox.")] = False,
    archive_days: Annotated[int, typer.Option(min=0, max=36_500, help="Days in the archive; 0: no archive.")] = 0,
    parked_messages: Annotated[int, typer.Option(min=0, max=10**12, help="Messages parked at once.")] = 0,
    failing_messages: Annotated[int, typer.Option(min=0, max=10**9, help="Failed messages that wait in place.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Compute nodes, processes, memory, disk and connections for a load, by measured figures.

    Asks no server. The figures are of two shared cores: give the rates of your machines, by `--process-rate` and
    `--node-rate`.
    """
    load = PlannedLoad(
        rate=rate,
        body_bytes=body,
        stop_s=stop_hours * 3_600,
        handler_ms=handler_ms,
        concurrency=concurrency,
        groups=groups,
        consumers_per_process=process_consumers,
        process_rate=process_rate,
        node_rate=node_rate,
        node_bytes=int(node_gb * 10**9),
        relays=relays,
        workers=workers,
        producers=producers,
        keys_per_week=keys_per_week,
        inbox=inbox,
        archive_days=archive_days,
        parked_messages=parked_messages,
        failing_messages=failing_messages,
    )
    show_rows([one._asdict() if as_json else _row(one) for one in requirements(load)], as_json=as_json, nothing="")


def _row(one: Requirement) -> dict[str, Any]:
    sized = one.name.endswith("_bytes")
    return {
        "need": one.name.removesuffix("_bytes").replace("_", " "),
        "at_least": format_size(one.value) if sized else f"{one.value:,}",
        "computed": one.computed,
        "figures": one.figures,
    }
