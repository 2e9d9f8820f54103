"""Live display of draining groups."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

import typer

from mqlayer.cli.output import console, echo
from mqlayer.escaping import escape
from mqlayer.routes import DrainProgress, drain_progress
from mqlayer.runtime.runtime import Runtime

if TYPE_CHECKING:
    from rich.table import Table

POLL_INTERVAL_S: Final = 0.5


class Display(Protocol):
    """Shows draining progress."""

    def __call__(self, left: Sequence[DrainProgress]) -> None:
        """Show the present progress."""


def watch_draining(runtime: Runtime, topic: str, timeout_s: float | None) -> None:
    """Show progress until all drained; exit code 1 at the timeout."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    with _display() as show:
        while True:
            left = drain_progress(runtime, topic)
            show(left)
            if not left or (until is not None and time.monotonic() >= until):
                break
            time.sleep(POLL_INTERVAL_S)
    if left:
        waiting = ", ".join(sorted({progress.group for progress in left}))
        echo(f"mqlayer: not drained within {timeout_s:g} s by: {waiting}", err=True)
        raise typer.Exit(1)
    echo(f"every group of topic {topic} has drained what is sealed")


@contextmanager
def _display() -> Iterator[Display]:
    shown = console()
    if not shown.is_terminal:
        yield PlainProgress()
        return
    from rich.live import Live

    with Live(console=shown, auto_refresh=False, transient=True) as live:
        yield lambda left: live.update(_table(left), refresh=True)


class PlainProgress:
    """Prints a line per changed group and partition."""

    def __init__(self) -> None:
        self._printed: dict[str, str] = {}

    def __call__(self, left: Sequence[DrainProgress]) -> None:
        """Print changes."""
        now = {
            f"group {one.group}, partition {one.partition}": f"{_remaining(one)}, route version {one.group_version}"
            for one in left
        }
        for what in self._printed.keys() - now.keys():
            echo(f"{what}: drained")
        for what, how_much in now.items():
            if self._printed.get(what) != how_much:
                echo(f"{what}: {how_much}")
        self._printed = now


def _table(left: Sequence[DrainProgress]) -> Table:
    from rich.table import Table

    table = Table("group", "route version", "partition", "left to drain", box=None, pad_edge=False)
    for one in left:
        table.add_row(escape(one.group), str(one.group_version), str(one.partition), _remaining(one))
    return table


def _remaining(one: DrainProgress) -> str:
    if one.remaining is None:
        return "its node is away"
    return f"{one.remaining} left" if one.remaining else "its last messages are settled"
