"""Display of failures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import typer
from typer.core import TyperGroup

from mqlayer.cli.output import echo
from mqlayer.errors import MqlayerError, StoreUnavailable, VersionRefused

REFUSED_CODE: Final = 78
"""Exit code of a process whose code the schema does not serve: a restart does not help, an upgrade does."""


class ErrorPrintingGroup(TyperGroup):
    """Shows an MqlayerError without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; an MqlayerError gives exit code 1, VersionRefused 78."""
        with failures_shown():
            return super().invoke(ctx)


@contextmanager
def failures_shown() -> Iterator[None]:
    """End with exit code 1 on an MqlayerError, 78 on VersionRefused."""
    try:
        yield
    except MqlayerError as error:
        show_failure(error)
        raise typer.Exit(REFUSED_CODE if isinstance(error, VersionRefused) else 1) from error


def _stopped_stack(error: MqlayerError) -> str:
    """Say how to start this folder's stopped stack."""
    from mqlayer.stack.stack import DEFAULT_DIRECTORY, Stack  # not at start: it takes time

    if type(error) is not StoreUnavailable or not DEFAULT_DIRECTORY.is_dir():
        return ""
    try:
        stopped = [part.name for part in Stack().status() if part.state == "stopped"]
    except MqlayerError:
        return ""
    return f": the stack of this folder is stopped ({', '.join(stopped)}): run mqlayer up" if stopped else ""


def show_failure(error: MqlayerError) -> None:
    """Print an error; its further lines are indented, against forgery."""
    first, *others = f"mqlayer: {error}{_stopped_stack(error)}".rstrip("\n").split("\n")
    for line in (first, *(f"  {other}" for other in others)):
        echo(line, err=True)
