"""Common parts of bulk actions and replays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer

from mqlayer.cli.output import echo, show_rows
from mqlayer.redelivery import BulkAction, Replay

KeyOption = Annotated[str | None, typer.Option(help="Only of this message key.")]
RateOption = Annotated[float, typer.Option(min=0, help="Messages a second, at most; 0: no limit.")]
BackgroundOption = Annotated[bool, typer.Option("--background", help="Let the worker do it.")]

AnyJob = TypeVar("AnyJob", BulkAction, Replay)


def work_here(work: Callable[[], AnyJob], *, cancel: str) -> AnyJob:
    """Work on a job to its end; `cancel`: command for an interrupt."""
    try:
        return work()
    except KeyboardInterrupt:
        # The worker takes the job over, so show how to end it.
        echo(f"cut off; the worker goes on with it, or: {cancel}", err=True)
        raise


def print_result(done: Replay, name: str, row: Mapping[str, Any], counts: str, *, as_json: bool, see: str) -> None:
    """Print a job's result; `see`: command for details."""
    if as_json:
        show_rows([row], as_json=True, nothing="")
        return
    over = "somebody else works on it" if done.state == "running" else done.state
    echo(f"{name} is {over}: {counts}; {see}")


def common_columns(one: Replay) -> dict[str, Any]:
    """Return common columns: filter, actor, times."""
    return {
        "filter": one.filter.as_json(),
        "actor": one.actor,
        "started_at": one.started_at,
        "ended_at": one.ended_at,
        "worked_on": one.worked_on,
    }
