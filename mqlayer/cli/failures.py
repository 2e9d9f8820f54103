"""How a command tells that it failed."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from mqlayer.errors import MqlayerError


class FailureShowingGroup(TyperGroup):
    """A command group whose commands fail with one clear line, never with a traceback of ours."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an MqlayerError becomes its message and exit code 1."""
        try:
            return super().invoke(ctx)
        except MqlayerError as error:
            show_failure(error)
            raise typer.Exit(1) from error


def show_failure(error: MqlayerError) -> None:
    """Write the error's message to standard error, as it is: not as markup, and not wrapped."""
    Console(stderr=True, highlight=False).print(f"mqlayer: {error}", markup=False, soft_wrap=True)
