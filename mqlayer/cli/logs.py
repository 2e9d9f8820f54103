"""Logs of the commands, on standard error: set up once, before a command runs."""

from __future__ import annotations

import logging
from typing import Final

import typer

from mqlayer.logs import EventFormatter, JsonFormatter

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")

__all__ = ["LEVELS", "EventFormatter", "configure_logging"]


def configure_logging(level: str, *, as_json: bool = False) -> None:
    """Send the logs of this process to standard error."""
    if level.upper() not in LEVELS:
        raise typer.BadParameter(f"{level!r}: use one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else EventFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
