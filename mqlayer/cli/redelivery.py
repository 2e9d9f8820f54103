"""What commands of redrives and replays have in common: options, working on one here, and how it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer

from mqlayer.cli.output import echo, show_rows
from mqlayer.redelivery import Redrive, Replay

KeyOption = Annotated[str | None, typer.Option(help="Only of this message key.")]
RateOption = Annotated[float, typer.Option(min=0, help="Messages a second, at most; 0: no limit.")]
BackgroundOption = Annotated[bool, typer.Option("--background", help="Let the worker do it.")]

AnyJob = TypeVar("AnyJob", Redrive, Replay)


def work_here(work: Callable[[], AnyJob], *, cancel: str) -> AnyJob:
    """Work on a job to its end. `cancel`: the command that ends it, for whoever breaks this off."""
    try:
        return work()
    except KeyboardInterrupt:
        # Without a lease the worker's scan goes on with it: whoever breaks it off here wants it to rest or to end.
        echo(f"cut off; the worker goes on with it, or: {cancel}", err=True)
        raise


def print_result(
    done: Redrive | Replay, name: str, row: Mapping[str, Any], counts: str, *, as_json: bool, see: str
) -> None:
    """Say what came of a job. `see`: the command that shows it message by message."""
    if as_json:
        show_rows([row], as_json=True, nothing="")
        return
    over = "somebody else works on it" if done.state == "running" else done.state
    echo(f"{name} is {over}: {counts}; {see}")


def common_columns(one: Redrive | Replay) -> dict[str, Any]:
    """Return what rows of both end with: for what, by whom, and when."""
    return {
        "filter": one.filter.as_json(),
        "actor": one.actor,
        "started_at": one.started_at.isoformat(timespec="seconds"),
        "ended_at": one.ended_at and one.ended_at.isoformat(timespec="seconds"),
        "worked_on": one.worked_on,
    }
