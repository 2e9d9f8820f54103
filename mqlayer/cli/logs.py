"""Logs of a command, on standard error."""

from __future__ import annotations

import logging

import typer

from mqlayer.errors import InvalidInput
from mqlayer.logs import configure_logging


def configure_command_logging(level: str, *, as_json: bool = False) -> None:
    """Log to standard error; other handlers stay."""
    try:
        configure_logging(level, style="json" if as_json else "text")
    except InvalidInput as error:
        raise typer.BadParameter(str(error)) from None
    # The command's own error says the same, with the address.
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)
