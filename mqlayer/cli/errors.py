"""Display of failures."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from mqlayer.cli.output import echo
from mqlayer.errors import MqlayerError


class ErrorPrintingGroup(TyperGroup):
    """Shows an MqlayerError without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; an MqlayerError gives exit code 1."""
        try:
            return super().invoke(ctx)
        except MqlayerError as error:
            show_failure(error)
            raise typer.Exit(1) from error


def show_failure(error: MqlayerError) -> None:
    """Print an error; its further lines are indented, against forgery."""
    first, *others = f"mqlayer: {error}".rstrip("\n").split("\n")
    for line in (first, *(f"  {other}" for other in others)):
        echo(line, err=True)
