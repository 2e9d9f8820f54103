"""Logs of the commands, on standard error: set up once, before a command runs."""

from __future__ import annotations

import logging
import sys
from typing import Final, TextIO

import typer

from mqlayer.logs import EventFormatter, JsonFormatter

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")

__all__ = ["LEVELS", "EventFormatter", "configure_logging"]


class StandardErrorHandler(logging.StreamHandler[TextIO]):
    """Writes to what standard error is now, not to what it was when logging was set up."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record."""
        self.stream = sys.stderr
        super().emit(record)


def configure_logging(level: str, *, as_json: bool = False) -> None:
    """Send the logs of this process to standard error; handlers that others have set stay."""
    if level.upper() not in LEVELS:
        raise typer.BadParameter(f"{level!r}: use one of {', '.join(LEVELS)}")
    handler = StandardErrorHandler()
    handler.setFormatter(JsonFormatter() if as_json else EventFormatter())
    root = logging.getLogger()
    root.handlers[:] = [other for other in root.handlers if not isinstance(other, StandardErrorHandler)] + [handler]
    root.setLevel(level.upper())
    # What it warns of reaches the user as the command's own error, with the address.
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)
