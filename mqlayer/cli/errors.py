"""How a command tells that it failed."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from mqlayer.cli.output import console
from mqlayer.errors import MqlayerError
from mqlayer.escaping import escape


class ErrorPrintingGroup(TyperGroup):
    """A command group whose commands fail with one clear line, never with a traceback of ours."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an MqlayerError becomes its message and exit code 1."""
        try:
            return super().invoke(ctx)
        except MqlayerError as error:
            show_failure(error)
            raise typer.Exit(1) from error


def show_failure(error: MqlayerError) -> None:
    """Write the error's message to standard error, not wrapped; its further lines are set in: none passes for ours."""
    text = escape(f"mqlayer: {error}", lines=True).rstrip("\n").replace("\n", "\n  ")
    console(stderr=True).print(text, soft_wrap=True)
