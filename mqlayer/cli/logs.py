"""Logs of a command, on standard error."""

from __future__ import annotations

import logging
from typing import Any

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


def log_environment(context: typer.Context) -> dict[str, str]:
    """Return variables by which a process logs as this command does."""
    options: dict[str, Any] = context.find_root().params
    level, as_json = options.get("log_level", "INFO"), options.get("log_json", False)
    return {"MQLAYER_LOG_LEVEL": str(level), "MQLAYER_LOG_JSON": str(int(as_json))}
