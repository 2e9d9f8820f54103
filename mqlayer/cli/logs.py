"""Logs on standard error."""

from __future__ import annotations

import logging
import sys
from typing import Final, TextIO

import typer

from mqlayer.logs import EventFormatter, JsonFormatter

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")

__all__ = ["LEVELS", "EventFormatter", "configure_logging"]


class StandardErrorHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record."""
        self.stream = sys.stderr
        super().emit(record)


def configure_logging(level: str, *, as_json: bool = False) -> None:
    """Log to standard error; other handlers stay."""
    if level.upper() not in LEVELS:
        raise typer.BadParameter(f"{level!r}: use one of {', '.join(LEVELS)}")
    handler = StandardErrorHandler()
    handler.setFormatter(JsonFormatter() if as_json else EventFormatter())
    root = logging.getLogger()
    root.handlers[:] = [other for other in root.handlers if not isinstance(other, StandardErrorHandler)] + [handler]
    root.setLevel(level.upper())
    # The command's own error says the same, with the address.
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)
